"""Latencies of engines of one shape, or of several."""

from collections.abc import Sequence
from typing import Literal

from nestforge.bundle.build_record import Latency, LatencyPoint, Noise


def latency(
    engine: str,
    predicted_ms: float = 0.0,
    measured_p50_ms: float | None = None,
    measured_p95_ms: float | None = None,
    residency: Literal["shared", "packed", "mapped"] | None = None,
    points: Sequence[LatencyPoint] = (),
    noise: Noise | None = None,
) -> Latency:
    """Those of ``points``, else of one shape."""
    alone = LatencyPoint(1, 1, predicted_ms, measured_p50_ms, measured_p95_ms, noise)
    return Latency(engine, tuple(points) or (alone,), residency)
