"""What a run of an engine takes at any size of its range, from the few sizes that were measured or predicted.

Times are interpolated between neighbouring sizes on logarithmic scales, where work that grows with a power of the size
lies on a line; outside the sizes that are known the nearest ones hold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import exp, log

from ...elastic import Bucket
from ..bundle.manifest import Latency

# Milliseconds and whether they were measured.
LatencyAt = Callable[[Bucket], tuple[float, bool]]


def latency_at(latency: Latency) -> LatencyAt:
    """The latency of an engine as a function of the shape that it runs at: by its measured median, else predicted."""
    points = latency.points or ()
    measured = {(p.batch, p.sequence): p.measured_p50_ms for p in points if p.measured_p50_ms is not None}
    if measured:
        return _interpolated(measured, True)
    if points:
        return _interpolated({(p.batch, p.sequence): p.predicted_ms for p in points}, False)
    measured_ms = latency.measured_p50_ms
    fixed = (latency.predicted_ms, False) if measured_ms is None else (measured_ms, True)
    return lambda _: fixed


def _interpolated(known: Mapping[tuple[int, int], float], measured: bool) -> LatencyAt:
    batches, sequences = (sorted({size[axis] for size in known}) for axis in (0, 1))
    logs = {size: log(max(ms, 1e-6)) for size, ms in known.items()}

    def at(shape: Bucket) -> tuple[float, bool]:
        total = 0.0
        for batch, share in _neighbours(batches, shape.batch):
            for sequence, part in _neighbours(sequences, shape.sequence):
                total += share * part * logs[batch, sequence]
        return exp(total), measured

    return at


def _neighbours(sizes: Sequence[int], size: int) -> list[tuple[int, float]]:
    """The known sizes around ``size``, and the weight of each."""
    above = bisect_right(sizes, size)
    if above == 0 or above == len(sizes) or sizes[above - 1] == size:
        return [(sizes[max(0, above - 1)], 1.0)]
    low, high = sizes[above - 1], sizes[above]
    weight = log(size / low) / log(high / low)
    return [(low, 1 - weight), (high, weight)]
