"""Budgets such as ``mean_latency_ms<=5`` or ``mean_latency_ms<=50 %``, and simulation: costs and quality of thresholds
from one run with every exit closed, by pure arithmetic.

Letters: ``n`` rows, ``m`` exits, ``N`` rows a request, ``c`` sequence classes (the bucket lengths that occur).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...argument_types import number_within
from ...errors import InputError
from ...strict import nearest
from ..exits.policy import Compare, Costs, Figures
from ..inputs.arrays import Array

LATENCIES = ("mean_latency_ms", "p50_latency_ms", "p95_latency_ms", "p99_latency_ms")
METRICS = (*LATENCIES, "mean_flops")
_BUDGET = re.compile(r"\s*(\w+)\s*<=\s*(\S+?)(\s*%)?\s*", re.ASCII)
CLOSED = -1.0


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
    """Reads ``METRIC<=NUMBER`` or ``METRIC<=SHARE %``. Raises InputError for another form, metric or number."""
    match = _BUDGET.fullmatch(text)
    if not match:
        raise InputError(
            f"budget {text[:80]!r}: expected METRIC<=NUMBER, such as mean_latency_ms<=5, or a share of the whole "
            "engine's figure, such as mean_latency_ms<=50%"
        )
    metric, number, percent = match.groups()
    if metric not in METRICS:
        raise InputError(f"budget {text[:80]!r}: unknown metric {metric[:80]!r}{nearest(metric[:80], METRICS)}")
    try:
        limit = float(number)
    except ValueError:
        raise InputError(f"budget {text[:80]!r}: {number[:80]!r} is not a number") from None
    limit = number_within(f"budget {metric}", limit, float, {"above": 0})
    if percent and limit > 100:
        raise InputError(f"budget {text[:80]!r}: expected at most 100 % of the whole engine's figure")
    return ExitBudget(metric, limit, bool(percent))


@dataclass(frozen=True, eq=False)
class SegmentCosts:
    """``milliseconds`` and ``flops`` ``[m, N + 1, c]`` of a segment that runs so many rows, the longest in that class.

    No rows cost nothing.
    """

    milliseconds: Array
    flops: Array

    def scaled(self, factor: float) -> SegmentCosts:
        """With times multiplied by ``factor``."""
        return SegmentCosts(self.milliseconds * factor, self.flops)


@dataclass(frozen=True, eq=False)
class Observed:
    """The output of every exit for every row: ``gate`` float32 ``[n, m]``, the entropy (nats) that decides whether the
    row leaves there; ``good`` bool ``[n, m]``, whether the answer there is right; ``length_class`` ``[n]``.

    Rows are in the order in which requests of ``batch`` of them are formed; a last, smaller request counts for quality
    and FLOPs but not for latency.
    """

    gate: Array
    good: Array
    length_class: Array
    batch: int
    compare: Compare

    @property
    def rows(self) -> int:
        return int(self.gate.shape[0])

    @property
    def exits(self) -> int:
        return int(self.gate.shape[1])

    def leaving(self, thresholds: Array) -> Array:
        """The exit (0-based) that answers each row: int64 ``[n]``, for thresholds float32 ``[m - 1]``."""
        early = self.gate[:, :-1]
        certain = early < thresholds if self.compare == "<" else early <= thresholds  # False where NaN
        first = certain.argmax(axis=1)
        return np.where(certain[np.arange(self.rows), first], first, self.exits - 1)

    def quality(self, index: Array) -> float:
        """Share of good answers."""
        return float(self.answers(index).mean())

    def answers(self, index: Array) -> Array:
        """Whether each row's answer is good: bool ``[n]``."""
        return self.good[np.arange(self.rows), index]

    def histogram(self, index: Array) -> tuple[int, ...]:
        return tuple(np.bincount(index, minlength=self.exits).tolist())

    def request_ms(self, index: Array, costs: SegmentCosts) -> Array:
        """Milliseconds of every whole request ``[n // N]``."""
        return self._per_request(index, costs.milliseconds)[: self.rows // self.batch]

    def costs(self, index: Array, costs: SegmentCosts) -> Costs:
        """Simulated costs of rows that leave at ``index``; there must be at least one whole request."""
        flops = float(self._per_request(index, costs.flops).sum() / self.rows)
        times = self.request_ms(index, costs)
        p50, p95, p99 = np.percentile(times, [50, 95, 99]).tolist()
        return Costs(flops, float(times.mean()), p50, p95, p99)

    def figures(self, index: Array, costs: SegmentCosts) -> Figures:
        return Figures(self.rows, self.costs(index, costs), self.quality(index), self.histogram(index))

    def metric(self, index: Array, costs: SegmentCosts, metric: str) -> float:
        """One figure of ``costs``, by name."""
        if metric == "mean_flops":
            return float(self._per_request(index, costs.flops).sum() / self.rows)
        return float(latency_figure(self.request_ms(index, costs), metric))

    def _per_request(self, index: Array, table: Array) -> Array:
        """Sum over segments of ``table`` at the rows still there and their longest: float64 ``[requests]``."""
        if self.batch == 1:
            return np.cumsum(table[:, 1, :], axis=0)[index, self.length_class]
        total = np.zeros(self._classes.shape[0])
        leaving = np.full(self._classes.shape, -1)
        leaving.flat[: self.rows] = index
        for segment in range(self.exits):
            alive = leaving >= segment
            longest = np.where(alive, self._classes, 0).max(axis=1)
            total += table[segment, alive.sum(axis=1), longest]
        return total

    @cached_property
    def _classes(self) -> Array:
        """``length_class`` by request ``[requests, N]``, filled up with 0."""
        requests = -(-self.rows // self.batch)
        classes = np.zeros(requests * self.batch, np.int64)
        classes[: self.rows] = self.length_class
        return classes.reshape(requests, self.batch)


def latency_figure(times: Array, metric: str) -> Array:
    """The mean or the percentile that ``metric`` of ``Costs`` names, of ``times`` ``[..., requests]``: ``[...]``."""
    return times.mean(axis=-1) if metric[0] == "m" else np.percentile(times, int(metric[1:3]), axis=-1)


def batch_max(entropy: Array, batch: int) -> Array:
    """Entropies ``[n, m]`` with every row's replaced by the largest of its request; NaN wins."""
    starts = np.arange(0, len(entropy), batch)
    largest = np.maximum.reduceat(entropy, starts, axis=0)
    return np.repeat(largest, batch, axis=0)[: len(entropy)]


def monotone(table: Array) -> Array:
    """``table`` ``[m, N + 1, c]`` made non-decreasing in rows and in length: measured times waver, costs do not.

    Between the least table above that is monotone and the greatest below.
    """
    above = np.maximum.accumulate(np.maximum.accumulate(table, axis=1), axis=2)
    back = table[:, ::-1, ::-1]
    below = np.minimum.accumulate(np.minimum.accumulate(back, axis=1), axis=2)[:, ::-1, ::-1]
    return (above + below) / 2


def thresholds_between(entropies: Array, compare: Compare, classes: int) -> Array:
    """Every threshold that decides differently on these entropies: float32, rising, from ``CLOSED`` to one that lets
    all leave; the others lie halfway between neighbours, so that new rows near either are decided like them."""
    values = np.unique(entropies[np.isfinite(entropies)].astype(np.float32))
    greatest = np.append(values, np.float32(math.log(classes))).max()
    highest = np.nextafter(greatest, np.float32(np.inf))
    lower, upper = values[:-1], values[1:]
    between = lower + (upper - lower) / np.float32(2)
    # Neighbouring float32 have nothing between them; then the comparison itself keeps them apart.
    tight = (between <= lower) | (between >= upper)
    between[tight] = (lower if compare == "<=" else upper)[tight]
    return np.concatenate([[CLOSED], between, [highest]]).astype(np.float32)
