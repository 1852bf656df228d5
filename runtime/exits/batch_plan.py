"""A batch plan is which engines run so many rows: a batch between two buckets is split where that is cheaper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...elastic import Bucket


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Runs of one sequence length, the largest first, that hold a number of rows together; only the last has spare
    rows. ``cost`` is their sum, in the unit that the choice was made in. Equal to itself alone, so that it is a quick
    key."""

    buckets: tuple[Bucket, ...]
    cost: float

    @cached_property
    def rows(self) -> int:
        """Rows that run, spare ones included."""
        return sum(bucket.batch for bucket in self.buckets)

    @cached_property
    def sequence(self) -> int:
        return self.buckets[0].sequence


class BatchPlanner:
    """Finds the cheapest batch plan by what each engine costs (above 0). Thread-safe; plans are remembered.

    An engine counts as no dearer than those of larger buckets: where one was measured to be, something else disturbed
    the measurement.
    """

    def __init__(self, costs: Mapping[Bucket, float]) -> None:
        self._costs = {bucket: min(cost for other, cost in costs.items() if _holds(other, bucket)) for bucket in costs}
        self._batches: dict[int, list[Bucket]] = {}
        for bucket in sorted(costs, reverse=True):
            self._batches.setdefault(bucket.sequence, []).append(bucket)
        self._cheapest: dict[tuple[int, int], BatchPlan] = {}
        self._shortest: dict[tuple[int, int], BatchPlan] = {}
        self._best: dict[tuple[int, int], BatchPlan] = {}

    def cheapest(self, rows: int, longest: int) -> BatchPlan:
        """For ``rows`` rows of up to ``longest`` steps, no more than the longest bucket has; among equals the shorter
        sequence, then fewer runs, then fewer spare rows."""
        plan = self._cheapest.get((rows, longest))
        if plan is None:
            fitting = sorted(sequence for sequence in self._batches if sequence >= longest)
            plan = min((self._at(sequence, rows) for sequence in fitting), key=lambda plan: plan.cost)
            self._cheapest[rows, longest] = plan
        return plan

    def shortest(self, rows: int, longest: int) -> BatchPlan:
        """The cheapest among those of the shortest sequence that fits."""
        plan = self._shortest.get((rows, longest))
        if plan is None:
            plan = self._at(min(sequence for sequence in self._batches if sequence >= longest), rows)
            self._shortest[rows, longest] = plan
        return plan

    def cost(self, plan: BatchPlan) -> float:
        """What these engines take at another segment's ``plan``."""
        return sum(self._costs[bucket] for bucket in plan.buckets)

    def _at(self, sequence: int, rows: int) -> BatchPlan:
        """One plan for all lengths that it serves, so that what is kept by plan is kept once."""
        plan = self._best.get((sequence, rows))
        return plan or self._best.setdefault((sequence, rows), self._found(sequence, rows))

    def _found(self, sequence: int, rows: int) -> BatchPlan:
        """``best[n]`` holds ``n`` rows: one run of any batch, and the best for the rows that it leaves."""
        best: list[tuple[float, int, int, tuple[Bucket, ...]]] = [(0.0, 0, 0, ())]
        for n in range(1, rows + 1):
            options = []
            for bucket in self._batches[sequence]:
                cost, runs, places, rest = best[max(0, n - bucket.batch)]
                options.append((cost + self._costs[bucket], runs + 1, places + bucket.batch, (bucket, *rest)))
            best.append(min(options, key=lambda option: option[:3]))
        cost, _, _, buckets = best[rows]
        # Fewer spare rows than the smallest run has, or that run could go; so they all lie in the last.
        return BatchPlan(tuple(sorted(buckets, reverse=True)), cost)


def _holds(outer: Bucket, inner: Bucket) -> bool:
    return outer.batch >= inner.batch and outer.sequence >= inner.sequence
