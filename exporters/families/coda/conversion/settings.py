"""What a conversion adds to an ordinary encoder (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .....errors import PlanError
from ..architecture.config import Activation, AdapterKind, KeysOf, Router, SoftTopK

MOST_SEED = 2**32 - 1
_REDUCTIONS = (8, 5, 3, 2, 1)
# 20 rounds are the paper's; the target epsilon of a task is not published.
_SCHEDULE = SoftTopK(rounds=20, epsilon=0.1, epsilon_start=4.0, epsilon_decay=0.7, initial="zero")


@dataclass(frozen=True, kw_only=True)
class ConversionSettings:
    """Adapters and routers, drawn with ``seed``; what they are called as in ``CodaConfig``.

    ``dense_layers`` stay dense (numbers from 0, nearest the input). By default ``reductions`` are 8, 5, 3, 2, 1 and the
    trained one, and ``adapter_activation`` is relu, but LoRA has none. ``num_labels`` draws a classifier of the mean of
    a row's tokens. ``seed`` is at most ``MOST_SEED``.
    """

    adapter: AdapterKind = "parallel"
    adapter_size: int = 64
    adapter_activation: Activation | None = None
    router: Router = "soft_top_k"
    keys_of: KeysOf = "all"
    reduction: int = 3
    reductions: tuple[int, ...] | None = None
    dense_layers: tuple[int, ...] = ()
    num_labels: int | None = None
    seed: int = 0

    def fields(self, layers: int, most_tokens: int) -> dict[str, Any]:
        """Those of ``CodaConfig`` that the settings decide, for a model of so many ``layers`` and tokens of a row.

        Raises PlanError for layers that the model has not, or where none is left to be conditional, for another seed,
        and for an activation of LoRA.
        """
        if type(self.seed) is not int or not 0 <= self.seed <= MOST_SEED:
            raise PlanError(f"seed: expected a whole number from 0 to {MOST_SEED}, got {self.seed!r:.80}")
        if self.adapter == "lora" and self.adapter_activation is not None:
            raise PlanError(f"adapter activation: lora has none, got {self.adapter_activation}; leave it out")
        conditional = tuple(layer for layer in range(layers) if layer not in self.dense_layers)
        if unknown := [layer for layer in self.dense_layers if not 0 <= layer < layers]:
            raise PlanError(f"dense layers: expected numbers from 0 to {layers - 1}, got {unknown[0]}")
        if not conditional:
            raise PlanError(f"dense layers: all {layers} are listed; expected at least one conditional layer")
        offered = {*_REDUCTIONS, self.reduction} if self.reductions is None else {*self.reductions}
        if self.reductions is None:
            offered = {r for r in offered if r <= most_tokens or r == self.reduction}
        return {
            "adapter": self.adapter,
            "adapter_size": self.adapter_size,
            "adapter_activation": None if self.adapter == "lora" else self.adapter_activation or "relu",
            "router": self.router,
            "soft_top_k": _SCHEDULE if self.router == "soft_top_k" else None,
            "keys_of": self.keys_of,
            "ffn_residual": "raw",
            "reduction": self.reduction,
            "reductions": tuple(sorted(offered, reverse=True)),
            "reduction_of_one": "dense" if 1 in offered else "routed",
            "conditional_layers": conditional if self.dense_layers else None,
            "num_labels": self.num_labels,
        }
