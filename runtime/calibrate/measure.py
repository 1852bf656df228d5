"""A chain of exits and its whole engine at work on real rows: what every exit says, and how long everything takes.

A request is ``batch`` rows in the data's order, cut to the longest of them where the model allows it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.open_bundle import Bundle
from ...errors import InputError
from ...progress import Progress, counted
from ..dispatcher import Dispatcher
from ..engines.latencies import host_latencies, interpolated
from ..engines.runner import EnginePool
from ..exits.chain import ExitChain, SegmentRun
from ..exits.policy import Costs, ExitPolicy, closed
from ..inputs.arrays import Array, InputChecker, cut_back
from ..request import Request
from .data import LabelledData
from .simulate import LATENCIES, SegmentCosts, latency_figure, monotone

# Runs timed per batch plan; the median counts.
_TIMED_RUNS = 9
# One measurement takes about so long, if that leaves it this many rounds.
_MEASURING_SECONDS = 10.0
_MIN_ROUNDS, _MAX_ROUNDS = 5, 9
# Requests that are timed at most.
_MAX_TIMED_REQUESTS = 400
# Calls of one set before the next has its turn: few against what else the machine does, many against the one that finds
# the processor's caches full of another engine.
_CALLS_PER_TURN = 16


@dataclass(frozen=True, eq=False)
class ExitAnswers:
    """The output of every exit for every row: ``entropy`` float32 and ``predicted`` (class) int64, both ``[n, m]``."""

    entropy: Array
    predicted: Array


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers of rows: ``index`` (exit), ``predicted`` (class) and ``flops``, int64 ``[n]`` each."""

    index: Array
    predicted: Array
    flops: Array


class ExitBench:
    """One submodel's chain and whole engine, opened as ``pool`` opens them."""

    def __init__(self, bundle: Bundle, submodel: str, pool: EnginePool) -> None:
        """Raises SelectionError where the submodel has no exits or not all its engines can run here."""
        self._bundle = bundle
        self._submodel = submodel
        self._pool = pool
        manifest = bundle.manifest
        self.chain = ExitChain(bundle, submodel, pool, host_latencies(bundle, pool.threads).of_chains)
        own = [engine for engine in manifest.engines if engine.submodel == submodel]
        self.engines = tuple(engine.id for engine in own)
        self.buckets = tuple(sorted({engine.bucket for engine in own if engine.segment is None}))
        self._dispatcher = Dispatcher(manifest, pool.residencies, bundle.build.latencies)
        self._inputs = InputChecker(manifest.inputs)

    def longest(self, batch: int) -> int:
        """The most steps that a request of ``batch`` rows may have. Raises InputError beyond every bucket."""
        fitting = [bucket.sequence for bucket in self.buckets if bucket.batch >= batch]
        if not fitting:
            known = ", ".join(bucket.label for bucket in self.buckets)
            raise InputError(f"batch {batch}: larger than every bucket of this bundle ({known}); ask for less at once")
        return max(fitting)

    def requests(self, data: LabelledData, batch: int) -> list[dict[str, Array]]:
        """The rows of ``data`` as requests, the last of them perhaps smaller."""
        return [
            self._request(data, np.arange(start, min(start + batch, data.rows))) for start in range(0, data.rows, batch)
        ]

    def length_classes(self, data: LabelledData, batch: int) -> tuple[Array, tuple[int, ...]]:
        """Per row the number of its class ``[n]``, and the length that each class runs at, rising: of static buckets
        theirs, in a range every length that occurs.

        Where steps behind the longest row may not be cut, a row has the length of its request.
        """
        lengths = data.lengths
        starts = np.arange(0, data.rows, batch)
        exits = self._bundle.manifest.exits
        if exits is not None and not exits.trims:
            lengths = np.repeat(np.maximum.reduceat(lengths, starts), batch)[: data.rows]
        occurring, places = np.unique(lengths, return_inverse=True)
        rows = [Bucket(1, int(length)) for length in occurring]
        run_at = [min(bucket.filled(row).sequence for bucket in self.buckets if bucket.holds(row)) for row in rows]
        needed, classes = np.unique(np.array(run_at)[places], return_inverse=True)
        return classes, tuple(needed.tolist())

    def observe(
        self, requests: Sequence[dict[str, Array]], samples: dict[tuple[int, tuple[Bucket, ...]], list[float]]
    ) -> ExitAnswers:
        """Runs every request with all exits closed; adds each segment's milliseconds to ``samples`` by its number and
        the buckets that ran it."""
        policy = closed(self.chain.exits)
        entropies, predictions = [], []
        for feeds in requests:
            seen: list[tuple[Array, Array]] = []

            def watch(run: SegmentRun, seen: list[tuple[Array, Array]] = seen) -> None:
                samples.setdefault((run.exit_index, run.buckets), []).append(run.milliseconds)
                seen.append((run.entropy.copy(), run.logits.argmax(axis=1)))

            self.chain.run(feeds, policy, watch)
            entropies.append(np.stack([entropy for entropy, _ in seen], axis=1))
            predictions.append(np.stack([predicted for _, predicted in seen], axis=1))
        return ExitAnswers(np.concatenate(entropies), np.concatenate(predictions))

    def segment_costs(
        self,
        data: LabelledData,
        batch: int,
        samples: dict[tuple[int, tuple[Bucket, ...]], list[float]],
        progress: Progress,
    ) -> SegmentCosts:
        """Cost of segments by rows and length class: FLOPs by the manifest, times by ``samples`` and further runs.

        Where engines have ranges, few of many sizes are timed, and the others lie between those.
        """
        classes, lengths = self.length_classes(data, batch)
        exits = self.chain.exits
        counts, numbers = self._timed_sizes(batch, lengths)
        probes: dict[tuple[Bucket, ...], dict[str, Array]] = {}
        for number in numbers:
            rows = np.flatnonzero(classes == number)
            for count in counts:
                plan = self.chain.batch_plan(0, count, lengths[number])
                probes.setdefault(plan, self._request(data, np.resize(rows, count)))
        lacking = {plan: feeds for plan, feeds in probes.items() if len(samples.get((0, plan), ())) < _TIMED_RUNS}
        for feeds in lacking.values():
            self.observe([feeds], {})  # opens its engines
        for _ in counted(progress, "time segments", range(_TIMED_RUNS)):
            for feeds in lacking.values():
                self.observe([feeds], samples)

        sizes = [(count, lengths[number]) for count in counts for number in numbers]
        shape = (exits, batch + 1, len(lengths))
        milliseconds, flops = np.zeros(shape), np.zeros(shape)
        for segment in range(exits):
            timed = {size: self._timed(segment, *size, samples) for size in sizes}
            at_size = interpolated(timed)
            for count, number in np.ndindex(batch, len(lengths)):
                size = Bucket(count + 1, lengths[number])
                milliseconds[segment, count + 1, number] = at_size(size)
                plan = self.chain.batch_plan(segment, size.batch, size.sequence)
                shares = [each for run in plan for each in [self._row_flops(segment, run)] * run.batch]
                flops[segment, count + 1, number] = sum(shares[: size.batch])
        return SegmentCosts(monotone(milliseconds), flops)

    def _timed_sizes(self, batch: int, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """The numbers of rows, and of length classes, at which segments are timed: all, in ranges their ends and the
        powers of two between."""
        counts, numbers = list(range(1, batch + 1)), list(range(len(lengths)))
        if not all(bucket.is_static for bucket in self.buckets):
            counts = list(Bucket(1, batch, None, 1).doublings)
            ends = Bucket(1, lengths[-1], None, lengths[0]).doublings
            numbers = sorted(set(np.searchsorted(lengths, ends).tolist()))
        return counts, numbers

    def _timed(
        self, segment: int, count: int, length: int, samples: Mapping[tuple[int, tuple[Bucket, ...]], list[float]]
    ) -> float:
        """The median of a segment's ``samples`` at one size. With every exit closed, all segments ran in the batch plan
        of the first."""
        own, first = (self.chain.batch_plan(each, count, length) for each in (segment, 0))
        return median(samples.get((segment, own)) or samples[segment, first])

    def _row_flops(self, segment: int, shape: Bucket) -> int:
        return self.chain.engine(segment, shape).row_flops(shape.sequence)

    def run_whole(self, feeds: dict[str, Array]) -> list[Array]:
        """The whole engine's outputs, in the manifest's order."""
        given = self._inputs.shape_of(feeds)
        engine = self._whole_engine(given)
        outputs = self._pool.get(engine).run(self._inputs.filled(feeds, engine.bucket.filled(given)))
        return cut_back(outputs, self._bundle.manifest.outputs, given)

    def whole_flops(self, requests: Sequence[dict[str, Array]]) -> Array:
        """FLOPs of the whole engine on every row of these requests: int64 ``[n]``. Nothing runs."""
        shapes = [self._inputs.shape_of(feeds) for feeds in requests]
        each = [self._whole_engine(given).row_flops(given.sequence) for given in shapes]
        return np.repeat(each, [given.batch for given in shapes])

    def answer(self, requests: Sequence[dict[str, Array]], policy: ExitPolicy) -> Answers:
        """The chain's answers to these requests."""
        runs = [self.chain.run(feeds, policy) for feeds in requests]
        return Answers(
            np.concatenate([run.index for run in runs]),
            np.concatenate([run.logits.argmax(axis=1) for run in runs]),
            np.concatenate([run.flops for run in runs]),
        )

    def answer_whole(self, requests: Sequence[dict[str, Array]]) -> Answers:
        """The whole engine's answers to these requests."""
        exits, specs = self._bundle.manifest.exits, self._bundle.manifest.outputs
        assert exits is not None
        logits = [spec.name for spec in specs].index(exits.logits)
        predicted = np.concatenate([self.run_whole(feeds)[logits].argmax(axis=1) for feeds in requests])
        return Answers(np.full(len(predicted), self.chain.exits - 1), predicted, self.whole_flops(requests))

    def _whole_engine(self, given: Bucket) -> EngineEntry:
        return self._dispatcher.choose(Request(submodel=self._submodel), given.batch, given.sequence).engine

    def _request(self, data: LabelledData, rows: Array) -> dict[str, Array]:
        return self._inputs.taken(data.feeds, rows, int(data.lengths[rows].max()))


def spread(*costs: Array) -> Array:
    """The numbers of the requests that are timed, ``_MAX_TIMED_REQUESTS`` at most, rising. By each of ``costs``
    ``[requests]``, most of all by the last, they are evenly spread over all requests, so that they cost on average what
    all do."""
    order = np.lexsort(costs)
    places = np.linspace(0, len(order) - 1, min(len(order), _MAX_TIMED_REQUESTS)).round().astype(int)
    return np.sort(order[places])


def time_in_turns(sets: Sequence[Sequence[Callable[[], object]]], progress: Progress, stage: str) -> list[Array]:
    """Milliseconds of every call, ``[rounds, calls]`` per set: in each round all sets take turns, some calls at a time,
    so that what else the machine does meets all of them alike."""
    began = perf_counter()
    for calls in sets:
        for call in calls:
            call()
    seconds = perf_counter() - began
    rounds = int(np.clip(_MEASURING_SECONDS / max(seconds, 1e-9), _MIN_ROUNDS, _MAX_ROUNDS))
    times = [np.empty((rounds, len(calls))) for calls in sets]
    for turn in counted(progress, stage, range(rounds)):
        for begin in range(0, max(map(len, sets)), _CALLS_PER_TURN):
            for calls, taken in zip(sets, times, strict=True):
                for number, call in enumerate(calls[begin : begin + _CALLS_PER_TURN], begin):
                    started = perf_counter()
                    call()
                    taken[turn, number] = 1e3 * (perf_counter() - started)
    return times


def measured_figure(times: Array, metric: str) -> float:
    """The latency ``metric`` of measured ``times`` ``[rounds, requests]``.

    For a mean, every request counts with the median of its rounds: an interruption by other work on the machine is not
    what exits cost, and one of a time slice would weigh as much as many requests. Percentiles are for such tails, so
    they are taken over all requests of a round, and the median of the rounds counts.
    """
    if metric[0] == "m":
        return float(latency_figure(np.median(times, axis=0), metric))
    return float(np.median(latency_figure(times, metric)))


def costs_of(times: Array, flops: Array) -> Costs:
    """Costs of measured ``times`` ``[rounds, requests]``, milliseconds, and FLOPs by row."""
    return Costs(float(flops.mean()), *(measured_figure(times, metric) for metric in LATENCIES))
