"""Sparse Mixers: encoders that mix tokens by fixed matrices, with experts of fixed capacity. See docs/sparse-mixer.md.

Axes, each offered at the values that the configuration lists: ``moe.capacity_factor`` (percent),
``moe.group_size`` (tokens), ``moe.experts`` (the first experts of every layer that has them) and ``sequence``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ....bucket import Bucket
from ....bundle.entries.tensor_spec import Role, TensorSpec
from ....bundle.manifest import TextEntry
from ....elastic import SEQUENCE, Submodel
from ....workload import Op
from ...architecture import Architecture, Variants
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import read_config
from ...family import Family
from ...signature import Signature
from .architecture.config import CAPACITY, EXPERTS, GROUP, SparseMixerConfig
from .architecture.forward_ops import forward_ops
from .architecture.presets import PRESETS
from .architecture.shapes import TABLES, compare_weights, elastic_spec, parameter_shapes
from .architecture.variant_ops import variant_ops
from .routes import ExpertRoutes

if TYPE_CHECKING:  # plans are made without torch
    import torch


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, SparseMixerConfig)
    shapes = parameter_shapes(config)
    if checkpoint.has_weights:
        compare_weights(checkpoint, config, shapes)

    def workload(submodel: Submodel, bucket: Bucket) -> list[Op]:
        return forward_ops(config, submodel, submodel.at(bucket))

    def variants(submodel: Submodel, bucket: Bucket) -> Variants:
        return variant_ops(config, submodel, submodel.at(bucket))

    def load() -> torch.nn.Module:
        from .folder import model_of
        from .model.answering import Answering

        return Answering(model_of(checkpoint, config))

    return Architecture(
        spec=elastic_spec(config),
        signature=_signature(checkpoint, config),
        parameter_shapes=shapes,
        workload=workload,
        load=load,
        narrow=_narrow,
        is_embedding=lambda parameter, _: parameter in TABLES,
        routing=ExpertRoutes(config) if config.moe_layers else None,
        variants=variants,
        lower=_lower,
    )


FAMILY = Family(
    "sparse_mixer",
    ("sparse_mixer",),
    read,
    reads_config_alone=True,
    presets={name: config.to_json() for name, config in PRESETS.items()},
)


def _signature(checkpoint: Checkpoint, config: SparseMixerConfig) -> Signature:
    tokens = ("batch", "sequence")
    # No mask: padding is known by its token, and only attention hides it.
    ids = TensorSpec("input_ids", "int64", tokens, pad=config.pad_token_id, high=config.vocab_size)
    inputs = [ids]
    if config.type_vocab_size > 1:  # where there is one type, nobody has to say it
        inputs.append(TensorSpec("token_type_ids", "int64", tokens, pad=0, high=config.type_vocab_size))
    text = None
    if checkpoint.tokenizer_files:
        text = TextEntry("tokenizer.json", ids.name, None, inputs[1].name if inputs[1:] else None, None)
    bound = f"{config.mixing} mixing" if config.some_mix else None
    static = None
    if config.moe_layers:
        static = "experts have slots for the tokens of one bucket"
    elif config.some_mix:
        static = f"{bound} is by matrices of one size"
    return Signature(
        tuple(inputs), _outputs(config), config.max_position_embeddings, text=text, bound=bound, static=static
    )


def _outputs(config: SparseMixerConfig) -> tuple[TensorSpec, ...]:
    """What the head returns, in this order; without a head the last states and the pooled first position."""
    tokens, d = ("batch", "sequence"), config.hidden_size
    outputs = []
    if config.predicts_tokens:
        outputs.append(TensorSpec("logits", "float32", (*tokens, config.vocab_size), role="tokens"))
    if config.num_labels is not None:
        # Submodels are compared by one distribution: where tokens are predicted, by that of tokens.
        name = "labels" if config.predicts_tokens else "logits"
        role: Role | None = None if config.predicts_tokens else "classes"
        outputs.append(TensorSpec(name, "float32", ("batch", config.num_labels), role=role))
    if not outputs:
        outputs.append(TensorSpec("last_hidden_state", "float32", (*tokens, d)))
        outputs.append(TensorSpec("pooler_output", "float32", ("batch", d)))
    return tuple(outputs)


def _lower(module: torch.nn.Module, variants: Mapping[str, str]) -> torch.nn.Module:
    from .model.answering import Answering
    from .model.lower import lower

    assert isinstance(module, Answering)
    return lower(module, variants)


def _narrow(module: torch.nn.Module, submodel: Submodel) -> None:
    from .model.encoder import SparseMixer
    from .model.moe import MoE

    chosen = {axis.name: value for axis, value in submodel.values}
    for part in module.modules():
        if isinstance(part, MoE):
            part.percent = chosen.get(CAPACITY, part.percent)
            part.group_size = chosen.get(GROUP, part.group_size)
            part.kept = chosen.get(EXPERTS, part.kept)
        elif isinstance(part, SparseMixer) and SEQUENCE in chosen:
            part.set_sequence(chosen[SEQUENCE])
