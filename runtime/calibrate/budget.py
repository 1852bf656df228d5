"""Budgets that thresholds are calibrated to, such as ``mean_latency_ms<=5`` or ``mean_latency_ms<=50 %``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ...argument_types import positive_limit
from ...errors import SelectionError
from ...strict import nearest
from ..exits.calibration import Costs

LATENCIES = ("mean_latency_ms", "p50_latency_ms", "p95_latency_ms", "p99_latency_ms")
METRICS = (*LATENCIES, "mean_flops")
_BUDGET = re.compile(r"\s*(\w+)\s*<=\s*(\S+?)(\s*%)?\s*", re.ASCII)


@dataclass(frozen=True)
class ExitBudget:
    """The most that ``metric`` of ``Costs`` may be: milliseconds per request, or FLOPs per row; or, where
    ``is_share``, percent of the same figure of the whole engine, on the same requests."""

    metric: str
    limit: float
    is_share: bool = False

    def __str__(self) -> str:
        return f"{self.metric}<={self.limit:.12g}{'%' if self.is_share else ''}"

    @property
    def is_latency(self) -> bool:
        return self.metric != "mean_flops"

    def of(self, costs: Costs) -> float:
        """The figure that this budget limits, in milliseconds or FLOPs."""
        return float(getattr(costs, self.metric))

    def resolved(self, whole: float) -> ExitBudget:
        """In milliseconds or FLOPs, where the whole engine's figure is ``whole``."""
        return replace(self, limit=self.limit / 100 * whole, is_share=False) if self.is_share else self

    def shown(self, figure: float) -> str:
        """A figure in this budget's unit, with the unit's name."""
        if self.is_share:
            return f"{figure:.4g} % of the whole engine's"
        return f"{figure:.4g} ms" if self.is_latency else f"{figure:.4g} FLOPs"


def parse_budget(text: str) -> ExitBudget:
    """Reads ``METRIC<=NUMBER`` or ``METRIC<=SHARE %``. Raises SelectionError for another form, metric or number."""
    match = _BUDGET.fullmatch(text)
    if not match:
        raise SelectionError(
            f"budget {text[:80]!r}: expected METRIC<=NUMBER, such as mean_latency_ms<=5, or a share of the whole "
            "engine's figure, such as mean_latency_ms<=50%"
        )
    metric, number, percent = match.groups()
    if metric not in METRICS:
        raise SelectionError(f"budget {text[:80]!r}: unknown metric {metric[:80]!r}{nearest(metric[:80], METRICS)}")
    try:
        limit = float(number)
    except ValueError:
        raise SelectionError(f"budget {text[:80]!r}: {number[:80]!r} is not a number") from None
    limit = positive_limit(f"budget {metric}", limit)
    if percent and limit > 100:
        raise SelectionError(f"budget {text[:80]!r}: expected at most 100 % of the whole engine's figure")
    return ExitBudget(metric, limit, bool(percent))
