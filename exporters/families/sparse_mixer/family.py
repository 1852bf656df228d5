"""Sparse Mixers: encoders that mix tokens by fixed matrices, with experts of fixed capacity. See docs/sparse-mixer.md.

Axes, each offered at the values that the configuration lists: ``moe.capacity_factor`` (percent),
``moe.group_size`` (tokens), ``moe.experts`` (the first experts of every layer that has them) and ``sequence``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....bucket import Bucket
from ....bundle.entries.engine_entry import RoutingEntry
from ....bundle.entries.tensor_spec import Role, TensorSpec
from ....elastic import SEQUENCE, Submodel
from ....workload import Op
from ...architecture import Architecture, Replay, Routing, Variants
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import read_config
from ...family import Family
from ...signature import Signature, text_entry
from .config import CAPACITY, EXPERTS, GROUP, ROUTES, SparseMixerConfig, routing
from .ops import TABLES, compare_weights, elastic_spec, forward_ops, parameter_shapes, variant_ops
from .presets import PRESETS

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
        from ...modules.layers import Answering
        from .model import model_of

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


def _signature(checkpoint: Checkpoint, config: SparseMixerConfig) -> Signature:
    tokens = ("batch", "sequence")
    # No mask: padding is known by its token, and only attention hides it.
    ids = TensorSpec("input_ids", "int64", tokens, pad=config.pad_token_id, high=config.vocab_size)
    inputs = [ids]
    if config.type_vocab_size > 1:  # where there is one type, nobody has to say it
        inputs.append(TensorSpec("token_type_ids", "int64", tokens, pad=0, high=config.type_vocab_size))
    text = text_entry(checkpoint, ids.name, types=inputs[1].name if inputs[1:] else None)
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
    """Outputs of the head, in this order; without a head the last states and the pooled first position."""
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
    from ...modules.layers import Answering
    from .model import lower as lowered

    assert isinstance(module, Answering)
    return lowered(module, variants)


def _narrow(module: torch.nn.Module, submodel: Submodel) -> None:
    from .model import SparseMixer
    from .moe import MoE

    chosen = {axis.name: value for axis, value in submodel.values}
    for part in module.modules():
        if isinstance(part, MoE):
            part.percent = chosen.get(CAPACITY, part.percent)
            part.group_size = chosen.get(GROUP, part.group_size)
            part.kept = chosen.get(EXPERTS, part.kept)
        elif isinstance(part, SparseMixer) and SEQUENCE in chosen:
            part.set_sequence(chosen[SEQUENCE])


@dataclass(frozen=True)
class ExpertRoutes(Routing):
    """The routes of every layer of experts, where ``config`` has at least one."""

    config: SparseMixerConfig

    def entries(self, submodel: Submodel, bucket: Bucket) -> tuple[RoutingEntry, ...]:
        """Experts Choose: the tokens of each expert by falling score; Tokens Choose: the expert of each token or -1."""
        route = routing(self.config, submodel, submodel.at(bucket))
        shape: tuple[int, ...] = (route.groups, route.tokens)
        if self.config.router == "experts_choose":
            shape = (route.groups, route.experts, route.capacity)
        return tuple(RoutingEntry(f"{ROUTES}{layer}", shape) for layer in self.config.moe_layers)

    def metadata(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, int | str]:
        shape = submodel.at(bucket)
        route = routing(self.config, submodel, shape)
        return {
            "router": self.config.router,
            "groups": route.groups,
            "tokens per group": route.tokens,
            "experts": route.experts,
            "experts scored": route.trained_experts,
            "capacity factor": f"{route.percent} %",
            "capacity": route.capacity,
            "capacity rounding": self.config.capacity_rounding,
            "min capacity": self.config.min_capacity,
            # A request of fewer rows is filled up with rows of padding, which are routed like any other.
            "rows share slots": "no" if shape.sequence % route.tokens == 0 else "yes",
        }

    def orders(self, name: str) -> Mapping[int, str]:
        layer = name.removeprefix(ROUTES)
        return {1: f"layers.{layer}.{EXPERTS}"} if self.config.router == "experts_choose" else {}

    def replay(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> Replay:
        from .model import SparseMixer
        from .replay import replay

        assert isinstance(module.model, SparseMixer)
        return replay(module.model, inputs, given)


FAMILY = Family(
    "sparse_mixer",
    ("sparse_mixer",),
    read,
    reads_config_alone=True,
    presets={name: config.to_json() for name, config in PRESETS.items()},
)
