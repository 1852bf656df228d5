"""Which experts compute which tokens: the routes of an engine, and what its manifest says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....bucket import Bucket
from ....bundle.entries.engine_entry import RoutingEntry
from ....elastic import Submodel
from ...architecture import Replay, Routing
from .architecture.capacity import routing
from .architecture.config import EXPERTS, ROUTES, SparseMixerConfig

if TYPE_CHECKING:  # plans are made without torch
    import torch


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
        from .model.encoder import SparseMixer
        from .model.replay import replay

        assert isinstance(module.model, SparseMixer)
        return replay(module.model, inputs, given)
