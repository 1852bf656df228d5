"""The segments of one submodel with their engines, and which of those run so many rows.

A batch plan is one run of an engine that takes any batch as it is, or runs of engines for fixed numbers of rows, into
which a batch is split where that is cheaper.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ...bucket import Bucket
from ...bundle.build_record import Latency
from ...bundle.entries.engine_entry import EngineEntry, ExitsEntry, SegmentEntry
from ...bundle.open_bundle import Bundle
from ...elastic import DEPTH
from ...errors import SelectionError
from ..engines.latencies import as_predicted, latency_at
from ..engines.runner import EnginePool, Runner

# Cost of a run of an engine at a shape that it takes, above 0.
Cost = Callable[[Bucket], float]
# Results are remembered by the size of a request; ranges may have thousands of them.
_MAX_REMEMBERED_SIZES = 4096
remembered = lru_cache(_MAX_REMEMBERED_SIZES)
# Cost of a run on a GPU before its first token, in tokens: 12 layers of hidden 768 take 1.5 ms for 64 tokens and
# 2.8 ms for 512 on an H200.
_TOKENS_OF_A_RUN = 512


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
        """Cost of these engines at another segment's ``plan``."""
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


class Segment:
    """One segment's engines by bucket, and what they cost."""

    def __init__(
        self,
        entry: SegmentEntry,
        engines: Mapping[Bucket, EngineEntry],
        known: Mapping[str, Sequence[Latency]],
        pool: EnginePool,
    ) -> None:
        self.entry = entry
        self.buckets = tuple(sorted(engines))
        self._engines = engines
        self.planner = BatchPlanner(_costs(engines, known, pool))
        self._pool = pool
        # All engines of a bundle are of one backend, so that one of them speaks for all.
        self.device_source = pool.device_source(next(iter(engines.values())))

    def engine(self, shape: Bucket) -> EngineEntry:
        """The engine that runs a batch of exactly ``shape``, one of a batch plan."""
        return self._engines[self.planner.bucket_of(shape)]

    def runner(self, shape: Bucket) -> Runner:
        return self._pool.get(self.engine(shape))


def segments_of(
    bundle: Bundle,
    exits: ExitsEntry,
    submodel: str,
    pool: EnginePool,
    latencies: Sequence[Latency],
    engines: Collection[str] | None,
) -> list[Segment]:
    """The segments of ``submodel`` (its id), in order, on ``engines`` (ids; None is all that can run here).

    Raises SelectionError where one of them is left out.
    """
    depth = bundle.manifest.submodel(submodel).values[DEPTH][0]
    usable = {engine.id for engine in pool.runnable()} if engines is None else engines
    known = _latencies_by_file(bundle, latencies)
    return [
        Segment(entry, _engines(bundle, submodel, entry.name, usable), known, pool)
        for entry in exits.segments
        if entry.layer <= depth
    ]


def _engines(bundle: Bundle, submodel: str, segment: str, usable: Collection[str]) -> dict[Bucket, EngineEntry]:
    every = [engine for engine in bundle.manifest.engines if (engine.submodel, engine.segment) == (submodel, segment)]
    engines = {engine.bucket: engine for engine in reversed(every) if engine.id in usable}
    missing = [engine.id for engine in every if engine.bucket not in engines]
    if missing or not every:
        raise SelectionError(
            f"submodel {submodel}: its exits cannot be used here, engine {(*missing, segment)[0]} is left out "
            "(by memory_mb, for want of its backend, or as a range on a GPU); its whole engine can answer"
        )
    return engines


def _latencies_by_file(bundle: Bundle, latencies: Sequence[Latency]) -> dict[str, list[Latency]]:
    """Engines of one file are one engine, whichever of them was measured."""
    files = {engine.id: engine.file for engine in bundle.manifest.engines}
    known: dict[str, list[Latency]] = {}
    for latency in latencies:
        if latency.engine in files:
            known.setdefault(files[latency.engine], []).append(latency)
    return known


def _costs(
    engines: Mapping[Bucket, EngineEntry], known: Mapping[str, Sequence[Latency]], pool: EnginePool
) -> dict[Bucket, Cost]:
    """Milliseconds at a shape by bucket, all measured or all predicted, else tokens, on a device those that a run costs
    whatever its size included."""
    measured, predicted = {}, {}
    for bucket, engine in engines.items():
        residency = pool.residencies.get(engine.id)
        for latency in sorted(known.get(engine.file, ()), key=lambda one: one.residency == residency):
            predicted[bucket] = _cost(as_predicted(latency))
            if latency.is_measured:
                measured[bucket] = _cost(latency)
    for costs in (measured, predicted):
        if len(costs) == len(engines) and all(cost(bucket.largest) > 0 for bucket, cost in costs.items()):
            return costs
    on_device = any(pool.device_source(engine) is not None for engine in engines.values())
    return dict.fromkeys(engines, lambda shape: float(shape.tokens + on_device * _TOKENS_OF_A_RUN))


def _cost(latency: Latency) -> Cost:
    milliseconds = latency_at(latency)
    return lambda shape: milliseconds(shape).p50_ms
