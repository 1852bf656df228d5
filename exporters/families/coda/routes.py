"""Which tokens the conditional layers compute: the routes of an engine, and what its manifest says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....bucket import Bucket
from ....bundle.entries.engine_entry import RoutingEntry
from ....elastic import Submodel
from ...routing import Replay, Routing
from .architecture.config import ROUTES, CodaConfig
from .architecture.selection import capacities, layer_tokens, reduction_of, token_bucket

if TYPE_CHECKING:  # plans are made without torch
    import torch


@dataclass(frozen=True)
class TokenRoutes(Routing):
    """The selected tokens of every conditional layer, where ``config`` has one."""

    config: CodaConfig

    def entries(self, submodel: Submodel, bucket: Bucket) -> tuple[RoutingEntry, ...]:
        """Of every row the tokens by falling rank; none where nothing is compared."""
        return self._entries(bucket.batch, capacities(self.config, submodel, bucket))

    def of_any_length(self, submodel: Submodel, longest: int) -> tuple[RoutingEntry, ...]:
        """The same of one row of up to ``longest`` tokens."""
        return self._entries(1, layer_tokens(self.config, longest, reduction_of(self.config, submodel), True))

    def _entries(self, rows: int, counts: Mapping[int, int]) -> tuple[RoutingEntry, ...]:
        if not self.config.has_scores:
            return ()
        return tuple(RoutingEntry(f"{ROUTES}{layer}", (rows, count)) for layer, count in counts.items())

    def metadata(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, int | str]:
        config, counts = self.config, capacities(self.config, submodel, bucket)
        tokens = token_bucket(config, bucket).sequence
        selected = {*counts.values()} or {tokens}
        stated: dict[str, int | str] = {
            "reduction": reduction_of(config, submodel),
            "tokens per row": tokens,
            "tokens selected": max(selected) if len(selected) == 1 else ", ".join(map(str, counts.values())),
            "router": config.router if counts else "none",
            "keys and values of": config.keys_of,
            "padding is routed": "yes" if config.route_padding else "no",
        }
        if counts and config.soft_top_k is not None:
            schedule = config.soft_top_k
            stated["soft top-k"] = (
                f"{schedule.rounds} rounds from epsilon {schedule.epsilon_start:g} by {schedule.epsilon_decay:g} to "
                f"{schedule.epsilon:g}, b from {schedule.initial}"
            )
        return stated

    def orders(self, name: str) -> Mapping[int, str]:  # noqa: ARG002  (tokens are never permuted)
        return {}

    def replay(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> Replay:
        from .model.encoder import CodaEncoder
        from .model.replay import replay

        assert isinstance(module.model, CodaEncoder)
        return replay(module.model, inputs, given)
