"""Budgets that thresholds are calibrated to, such as ``mean_latency_ms<=5``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import SelectionError
from ...strict import nearest
from ..exits.calibration import Costs
from ..limits import positive_limit

LATENCIES = ("mean_latency_ms", "p50_latency_ms", "p95_latency_ms", "p99_latency_ms")
METRICS = (*LATENCIES, "mean_flops")
_BUDGET = re.compile(r"\s*(\w+)\s*<=\s*(\S+)\s*", re.ASCII)


@dataclass(frozen=True)
class ExitBudget:
    """The most that ``metric`` of ``Costs`` may be: milliseconds per request, or FLOPs per row."""

    metric: str
    limit: float

    def __str__(self) -> str:
        return f"{self.metric}<={self.limit:.12g}"

    @property
    def is_latency(self) -> bool:
        return self.metric != "mean_flops"

    def of(self, costs: Costs) -> float:
        """The figure that this budget limits."""
        return float(getattr(costs, self.metric))

    def shown(self, figure: float) -> str:
        """A figure of this metric with its unit."""
        return f"{figure:.4g} ms" if self.is_latency else f"{figure:.4g} FLOPs"


def parse_budget(text: str) -> ExitBudget:
    """Reads ``METRIC<=NUMBER``. Raises SelectionError for another form, metric or number."""
    match = _BUDGET.fullmatch(text)
    if not match:
        raise SelectionError(f"budget {text[:80]!r}: expected METRIC<=NUMBER, such as mean_latency_ms<=5")
    metric, number = match.groups()
    if metric not in METRICS:
        raise SelectionError(f"budget {text[:80]!r}: unknown metric {metric[:80]!r}{nearest(metric[:80], METRICS)}")
    try:
        limit = float(number)
    except ValueError:
        raise SelectionError(f"budget {text[:80]!r}: {number[:80]!r} is not a number") from None
    return ExitBudget(metric, positive_limit(f"budget {metric}", limit))
