"""What a run of an engine takes at any size of its range, from the few sizes that were measured or predicted.

Between neighbouring lengths times are interpolated on logarithmic scales, where work that grows with a power of the
length lies on a line; between numbers of rows linearly, since each further row adds the same work, and few rows cost
less than a power through many would say. Outside the sizes that are known the nearest ones hold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from ...bucket import Bucket
from ...bundle.build_record import Latency, LatencyPoint
from ...bundle.noise import is_noisy

# Of what a file may say; a logarithm needs the one, and its inverse the other.
_LEAST_MS = 1e-6
_MOST_MS = 1e12
# Of a normal distribution: how far its 95th percentile lies above the median, in interquartile ranges.
_P95_PER_SPREAD = 1.22


@dataclass(frozen=True)
class RunTime:
    """Milliseconds of a run: the median, and ``p95_ms``, which 95 of 100 runs keep; of a prediction they are equal.
    ``is_noisy``: they rest on a measurement that is not to be trusted."""

    p50_ms: float
    p95_ms: float
    measured: bool
    is_noisy: bool = False


def latency_at(latency: Latency) -> Callable[[Bucket], RunTime]:
    """The latency of an engine as a function of the shape that it runs at: as measured, else predicted."""
    alone = LatencyPoint(1, 1, latency.predicted_ms, latency.measured_p50_ms, latency.measured_p95_ms, latency.noise)
    points = {(point.batch, point.sequence): point for point in latency.points or (alone,)}
    known = {
        size: (point.measured_p50_ms, _slow(point, point.measured_p50_ms))
        for size, point in points.items()
        if point.measured_p50_ms is not None
    }
    measured = bool(known)
    known = known or {size: (point.predicted_ms, point.predicted_ms) for size, point in points.items()}
    median = interpolated({size: p50 for size, (p50, _) in known.items()})
    slow = interpolated({size: p95 for size, (_, p95) in known.items()})
    noisy = {size for size, point in points.items() if is_noisy(point.noise)} if measured else set()
    batches, sequences = _axes(known)

    def at(shape: Bucket) -> RunTime:
        near = (
            (batch, sequence)
            for batch, _ in _neighbours(batches, shape.batch, float)
            for sequence, _ in _neighbours(sequences, shape.sequence, log)
        )
        return RunTime(median(shape), slow(shape), measured, bool(noisy) and not noisy.isdisjoint(near))

    return at


def _slow(point: LatencyPoint, p50_ms: float) -> float:
    """The 95th percentile; where too few runs were made for one, that of a normal distribution of their spread."""
    if point.measured_p95_ms is not None:
        return point.measured_p95_ms
    return p50_ms * (1 + _P95_PER_SPREAD * (point.noise.spread if point.noise else 0.0))


def predicted_at(latency: Latency) -> Callable[[Bucket], float]:
    """What was predicted for an engine in milliseconds, as a function of the shape that it runs at."""
    if latency.points is None:
        return lambda _: latency.predicted_ms
    return interpolated({(point.batch, point.sequence): point.predicted_ms for point in latency.points})


def interpolated(known: Mapping[tuple[int, int], float]) -> Callable[[Bucket], float]:
    """Times as a function of the shape, from those ``known`` at every batch of some and every sequence of some."""
    if len(known) == 1:
        (only,) = known.values()
        return lambda _: only
    batches, sequences = _axes(known)
    logs = {size: log(min(max(ms, _LEAST_MS), _MOST_MS)) for size, ms in known.items()}

    def at(shape: Bucket) -> float:
        lengths = _neighbours(sequences, shape.sequence, log)
        return sum(
            share * exp(sum(part * logs[batch, sequence] for sequence, part in lengths))
            for batch, share in _neighbours(batches, shape.batch, float)
        )

    return at


def _axes(known: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The batches and the sequences of a grid of sizes, rising."""
    batches, sequences = zip(*known, strict=True)
    return sorted(set(batches)), sorted(set(sequences))


def _neighbours(sizes: Sequence[int], size: int, scale: Callable[[int], float]) -> list[tuple[int, float]]:
    """The known sizes around ``size``, and the weight of each on ``scale``."""
    above = bisect_right(sizes, size)
    if above == 0 or above == len(sizes) or sizes[above - 1] == size:
        return [(sizes[max(0, above - 1)], 1.0)]
    low, high = sizes[above - 1], sizes[above]
    weight = (scale(size) - scale(low)) / (scale(high) - scale(low))
    return [(low, 1 - weight), (high, weight)]
