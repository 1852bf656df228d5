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
from ....elastic import Submodel
from ...architecture import ROUTES, Architecture, Replay, Routing
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.own_folder import read_config
from ...family import Deferred, own_family
from ...signature import TOKENS, Signature, text_signature
from .config import EXPERTS, PRESETS, SparseMixerConfig, routing
from .ops import TABLES, compare_weights, elastic_spec, forward_ops, parameter_shapes, variant_ops

if TYPE_CHECKING:
    import torch

    from . import model
else:
    model = Deferred(".model", __package__)


def read(checkpoint: Checkpoint) -> Architecture:
    """The model in ``checkpoint``, whose weights may be absent altogether."""
    config = read_config(checkpoint, SparseMixerConfig)
    shapes = parameter_shapes(config)
    if checkpoint.has_weights:
        compare_weights(checkpoint, config, shapes)
    return Architecture(
        spec=elastic_spec(config),
        signature=_signature(checkpoint, config),
        parameter_shapes=shapes,
        workload=lambda submodel, bucket: forward_ops(config, submodel, submodel.at(bucket)),
        load=lambda: model.answering(checkpoint, config),
        narrow=model.narrow,
        is_embedding=lambda parameter, _: parameter in TABLES,
        routing=ExpertRoutes(config) if config.moe_layers else None,
        variants=lambda submodel, bucket: variant_ops(config, submodel, submodel.at(bucket)),
        lower=model.lower,
    )


def _signature(checkpoint: Checkpoint, config: SparseMixerConfig) -> Signature:
    bound = f"{config.mixing} mixing" if config.some_mix else None
    static = None
    if config.moe_layers:
        static = "experts have slots for the tokens of one bucket"
    elif config.some_mix:
        static = f"{bound} is by matrices of one size"
    return text_signature(
        checkpoint,
        _outputs(config),
        config.max_position_embeddings,
        config.vocab_size,
        config.pad_token_id,
        None,  # padding is known by its token, and only attention hides it
        config.type_vocab_size,
        bound=bound,
        static=static,
    )


def _outputs(config: SparseMixerConfig) -> tuple[TensorSpec, ...]:
    """Outputs of the head, in this order; without a head the last states and the pooled first position."""
    d = config.hidden_size
    outputs = []
    if config.predicts_tokens:
        outputs.append(TensorSpec("logits", "float32", (*TOKENS, config.vocab_size), role="tokens"))
    if config.num_labels is not None:
        # Submodels are compared by one distribution: where tokens are predicted, by that of tokens.
        name = "labels" if config.predicts_tokens else "logits"
        role: Role | None = None if config.predicts_tokens else "classes"
        outputs.append(TensorSpec(name, "float32", ("batch", config.num_labels), role=role))
    if not outputs:
        outputs.append(TensorSpec("last_hidden_state", "float32", (*TOKENS, d)))
        outputs.append(TensorSpec("pooler_output", "float32", ("batch", d)))
    return tuple(outputs)


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
        return model.replay(module.model, inputs, given)


FAMILY = own_family("sparse_mixer", read, PRESETS)
