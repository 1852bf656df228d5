"""A batch plan is which engines run so many rows: one run of an engine that takes any batch as it is, or runs of
engines for fixed numbers of rows, into which a batch is split where that is cheaper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ...bucket import Bucket

# What a run of an engine costs at a shape that it takes, above 0.
Cost = Callable[[Bucket], float]
# What is remembered is so by the size of a request; ranges may have thousands of them.
_MAX_REMEMBERED_SIZES = 4096
remembered = lru_cache(_MAX_REMEMBERED_SIZES)


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Runs of one sequence length, the largest first, that hold a number of rows together; only the last has spare
    rows. ``buckets`` are the shapes of the runs, static ones. ``cost`` is their sum, in the unit that the choice was
    made in. Plans of the same runs are equal."""

    buckets: tuple[Bucket, ...]
    cost: float

    @cached_property
    def rows(self) -> int:
        """Rows that run, spare ones included."""
        return sum(bucket.batch for bucket in self.buckets)

    @cached_property
    def sequence(self) -> int:
        return self.buckets[0].sequence

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchPlan) and self.buckets == other.buckets

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.buckets)


class BatchPlanner:
    """Finds the cheapest batch plan by what each engine costs. Thread-safe; plans are remembered.

    An engine with a free batch runs all rows at once or none. A shape is run by the engine whose static bucket it is,
    else by that of the smallest range that takes it as it is. A static engine counts as no dearer than those of larger
    buckets: where one was measured to be, something else disturbed the measurement.
    """

    def __init__(self, costs: Mapping[Bucket, Cost]) -> None:
        self._costs = dict(costs)
        static = {bucket: cost(bucket) for bucket, cost in costs.items() if bucket.is_static}
        self._static = {bucket: min(cost for other, cost in static.items() if other.holds(bucket)) for bucket in static}
        self._ranges = sorted((bucket for bucket in costs if not bucket.is_static), key=lambda one: (one.tokens, one))
        self._buckets = sorted(costs, reverse=True)
        self._found_cheapest, self._found_shortest = remembered(self._cheapest), remembered(self._shortest)
        # One plan for all lengths that it serves, so that what is kept by plan is kept once.
        self._at, self._cost_of = remembered(self._best_at), remembered(self._cost_at)

    def cheapest(self, rows: int, longest: int) -> BatchPlan:
        """For ``rows`` rows of up to ``longest`` steps, which one bucket holds; among equals the shorter sequence, then
        fewer runs, then fewer spare rows."""
        return self._found_cheapest(rows, longest)

    def shortest(self, rows: int, longest: int) -> BatchPlan:
        """The cheapest among those of the shortest sequence that fits."""
        return self._found_shortest(rows, longest)

    def cost(self, plan: BatchPlan) -> float:
        """What these engines take at another segment's ``plan``."""
        return sum(self._cost_of(shape) for shape in plan.buckets)

    def bucket_of(self, shape: Bucket) -> Bucket:
        """The bucket whose engine runs a batch of exactly ``shape``, one of a plan."""
        if shape in self._static:
            return shape
        return next(bucket for bucket in self._ranges if bucket.nearest(shape) == shape)

    def _cheapest(self, rows: int, longest: int) -> BatchPlan:
        plans = (self._at(sequence, rows) for sequence in self._sequences(rows, longest))
        return min(plans, key=lambda plan: plan.cost)

    def _shortest(self, rows: int, longest: int) -> BatchPlan:
        return self._at(self._sequences(rows, longest)[0], rows)

    def _sequences(self, rows: int, longest: int) -> list[int]:
        """The lengths at which such rows may run, rising."""
        taking = [bucket for bucket in self._buckets if bucket.min_batch is None or bucket.batch >= rows]
        row = Bucket(1, longest)
        return sorted({bucket.filled(row).sequence for bucket in taking if bucket.holds(row)})

    def _best_at(self, sequence: int, rows: int) -> BatchPlan:
        """The cheapest of this length; at least one engine takes it."""
        taking = [bucket for bucket in self._buckets if bucket.smallest.sequence <= sequence <= bucket.sequence]
        together = Bucket(rows, sequence)
        free = [bucket for bucket in taking if bucket.min_batch is not None and bucket.holds(together)]
        plans = [self._planned([shape]) for shape in sorted({bucket.filled(together) for bucket in free})]
        batches = list(dict.fromkeys(bucket.batch for bucket in taking if bucket.min_batch is None))
        if batches:
            plans.append(self._planned(self._split(sequence, rows, batches)))
        return min(plans, key=lambda plan: (plan.cost, len(plan.buckets), plan.rows))

    def _planned(self, shapes: list[Bucket]) -> BatchPlan:
        return BatchPlan(tuple(shapes), sum(map(self._cost_of, shapes)))

    def _split(self, sequence: int, rows: int, batches: list[int]) -> list[Bucket]:
        """The cheapest runs of ``batches``: ``best[n]`` holds ``n`` rows, by one run of any batch and the best for the
        rows that it leaves."""
        best: list[tuple[float, int, int, tuple[Bucket, ...]]] = [(0.0, 0, 0, ())]
        for n in range(1, rows + 1):
            options = []
            for batch in batches:
                shape = Bucket(batch, sequence)
                cost, runs, places, rest = best[max(0, n - batch)]
                options.append((cost + self._cost_of(shape), runs + 1, places + batch, (shape, *rest)))
            best.append(min(options, key=lambda option: option[:3]))
        # Fewer spare rows than the smallest run has, or that run could go; so they all lie in the last.
        return sorted(best[rows][3], reverse=True)

    def _cost_at(self, shape: Bucket) -> float:
        if shape in self._static:
            return self._static[shape]
        return self._costs[self.bucket_of(shape)](shape)
