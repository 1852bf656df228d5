"""Sparse Mixers: encoders that mix tokens by fixed matrices, with experts of fixed capacity. See docs/sparse-mixer.md.

Axes, each offered at the values that the configuration lists: ``moe.capacity_factor`` (percent),
``moe.group_size`` (tokens), ``moe.experts`` (the first experts of every layer that has them) and ``sequence``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ....elastic import SEQUENCE, Bucket, ElasticSpec, Submodel
from ....runtime.bundle.manifest import DecisionEntry, Role, TensorSpec, TextEntry
from ....workload import Op
from ...checkpoints.checkpoint import Checkpoint
from ...family import Family, Replay, Signature
from .architecture.capacity import capacity_rule, routing
from .architecture.config import CAPACITY, EXPERTS, GROUP, ROUTES, SparseMixerConfig, read_config
from .architecture.forward_ops import forward_ops
from .architecture.presets import PRESETS
from .architecture.shapes import TABLES, compare_weights, elastic_spec, parameter_shapes
from .architecture.variant_ops import variant_ops

if TYPE_CHECKING:
    import torch


class SparseMixerFamily(Family):
    name: ClassVar[str] = "sparse_mixer"
    model_types: ClassVar[tuple[str, ...]] = ("sparse_mixer",)
    reads_config_alone: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {name: config.to_json() for name, config in PRESETS.items()}

    def describe(self, checkpoint: Checkpoint) -> ElasticSpec:
        return elastic_spec(read_config(checkpoint))

    def signature(self, checkpoint: Checkpoint) -> Signature:
        config = read_config(checkpoint)
        tokens = ("batch", "sequence")
        # No mask: padding is told by its token, and only attention hides it.
        ids = TensorSpec("input_ids", "int64", tokens, pad=config.pad_token_id, high=config.vocab_size)
        inputs = [ids]
        if config.type_vocab_size > 1:  # where there is one type, nobody has to say it
            inputs.append(TensorSpec("token_type_ids", "int64", tokens, pad=0, high=config.type_vocab_size))
        text = None
        if (checkpoint.folder / "tokenizer.json").is_file():
            text = TextEntry("tokenizer.json", ids.name, None, inputs[1].name if inputs[1:] else None, None)
        bound = f"{config.mixing} mixing" if config.some_mix else None
        return Signature(tuple(inputs), _outputs(config), config.max_position_embeddings, text=text, bound=bound)

    def workload(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> list[Op]:
        return forward_ops(read_config(checkpoint), submodel, submodel.at(bucket))

    def variants(
        self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket
    ) -> Mapping[str, Mapping[str, list[Op]]]:
        return variant_ops(read_config(checkpoint), submodel, submodel.at(bucket))

    def facts(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> Mapping[str, int | str]:
        config = read_config(checkpoint)
        if not config.moe_layers:
            return {}
        shape = submodel.at(bucket)
        route = routing(config, submodel, shape)
        return {
            "router": config.router,
            "groups": route.groups,
            "tokens per group": route.tokens,
            "experts": route.experts,
            "experts scored": route.trained_experts,
            "capacity factor": f"{route.percent} %",
            "capacity": route.capacity,
            "capacity rule": capacity_rule(config),
            # A request of fewer rows is filled up with rows of padding, which are routed like any other.
            "rows of a batch": "independent" if shape.sequence % route.tokens == 0 else "compete for slots",
        }

    def decisions(self, checkpoint: Checkpoint, submodel: Submodel, bucket: Bucket) -> tuple[DecisionEntry, ...]:
        """Experts Choose: the tokens of each expert by falling score; Tokens Choose: the expert of each token or -1."""
        config = read_config(checkpoint)
        if not config.moe_layers:
            return ()
        route = routing(config, submodel, submodel.at(bucket))
        shape: tuple[int, ...] = (route.groups, route.tokens)
        if config.router == "experts_choose":
            shape = (route.groups, route.experts, route.capacity)
        return tuple(DecisionEntry(f"{ROUTES}{layer}", shape) for layer in config.moe_layers)

    def parameter_shapes(self, checkpoint: Checkpoint) -> Mapping[str, tuple[int, ...]]:
        config = read_config(checkpoint)
        shapes = parameter_shapes(config)
        if checkpoint.has_weights:
            compare_weights(checkpoint, config, shapes)
        return shapes

    def load(self, checkpoint: Checkpoint) -> torch.nn.Module:
        from .folder import model_of
        from .model.answering import Answering

        return Answering(model_of(checkpoint))

    def decision_orders(self, checkpoint: Checkpoint, decision: str) -> Mapping[int, str]:
        layer = decision.removeprefix(ROUTES)
        return {1: f"layers.{layer}.{EXPERTS}"} if read_config(checkpoint).router == "experts_choose" else {}

    def replay(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> Replay:
        from .model.encoder import SparseMixer
        from .model.replay import replay

        assert isinstance(module.model, SparseMixer)
        return replay(module.model, inputs, given)

    def lower(self, module: torch.nn.Module, variants: Mapping[str, str]) -> torch.nn.Module:
        from .model.answering import Answering
        from .model.lower import lower

        assert isinstance(module, Answering)
        return lower(module, variants)

    def narrow(self, module: torch.nn.Module, submodel: Submodel) -> None:
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

    def is_embedding(self, parameter: str, shape: tuple[int, ...]) -> bool:  # noqa: ARG002  (told by the name alone)
        return parameter in TABLES


FAMILY = SparseMixerFamily()


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
