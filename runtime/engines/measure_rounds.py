"""Engines timed in turns, each several times: the best round is the figure, and the others say how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...elastic import Bucket
from ..bundle.manifest import EngineEntry, LatencyPoint
from ..bundle.noise import Noise
from ..inputs.arrays import Array
from .host_load import OthersLoad
from .measure import LatencyStats, measure
from .runner import Runner

_ROUNDS = 3
_ROUND_SECONDS = 0.3
# In a round of a static engine, and for a percentile.
_LEAST_RUNS = 10
# Of an engine of a range, at each shape; the largest takes long enough by itself.
_SHAPE_SECONDS = 0.05
_SHAPE_ROUNDS = 2
_SHAPE_RUNS = 3
# Whole engines that are open at once while they are measured: each may own a packed copy of its weights.
_ENGINES_OPEN_AT_ONCE = 4


@dataclass(frozen=True)
class Timed:
    """An open engine and inputs of one shape; ``is_static`` where it has no other."""

    runner: Runner
    feeds: Mapping[str, Array]
    is_static: bool


@dataclass(frozen=True)
class Measured:
    """Median and 95th percentile in milliseconds, and how far to trust them; few runs have no percentile."""

    p50_ms: float
    p95_ms: float | None
    noise: Noise


def measured_shapes(bucket: Bucket) -> list[Bucket]:
    """The shapes at which an engine is measured: its own, or of a range its ends, and the powers of two of its sequence
    between, at the least and the most rows."""
    if bucket.is_static:
        return [bucket]
    batches = sorted({bucket.smallest.batch, bucket.batch})
    return [Bucket(batch, sequence) for batch in batches for sequence in bucket.doublings]


def measured_together(engines: Sequence[EngineEntry]) -> list[list[EngineEntry]]:
    """Engines that are measured in turns: all buckets of a segment, since the chain weighs those against each other."""
    files = list({engine.file: engine for engine in engines}.values())
    wholes = [engine for engine in files if engine.segment is None]
    groups = [wholes[start : start + _ENGINES_OPEN_AT_ONCE] for start in range(0, len(wholes), _ENGINES_OPEN_AT_ONCE)]
    segments: dict[str, list[EngineEntry]] = {}
    for engine in files:
        if engine.segment is not None:
            segments.setdefault(engine.file.removesuffix(f".{engine.bucket.label}.onnx"), []).append(engine)
    return [*groups, *segments.values()]


def with_measured(point: LatencyPoint, measured: Measured) -> LatencyPoint:
    """``point`` with what was measured at its shape."""
    return replace(point, measured_p50_ms=measured.p50_ms, measured_p95_ms=measured.p95_ms, noise=measured.noise)


def best_of_rounds(timed: Sequence[Timed]) -> list[Measured]:
    """Each of ``timed`` in its best of several rounds, all in turn.

    Another program's burst then spoils a round of some engines, not the proportions between them.
    """
    rounds: list[list[LatencyStats]] = [[] for _ in timed]
    load = OthersLoad()
    for number in range(_ROUNDS):
        for each, stats in zip(timed, rounds, strict=True):
            if each.is_static:
                stats.append(measure(each.runner, each.feeds, min_runs=_LEAST_RUNS, max_seconds=_ROUND_SECONDS))
            elif number < _SHAPE_ROUNDS:
                warmup = 1 if number == 0 else 0  # a shape is new once
                stats.append(
                    measure(each.runner, each.feeds, warmup=warmup, min_runs=_SHAPE_RUNS, max_seconds=_SHAPE_SECONDS)
                )
    others = load.share()
    return [_best(stats, others) for stats in rounds]


def _best(rounds: Sequence[LatencyStats], others: float | None) -> Measured:
    best, again, *_ = sorted(rounds, key=lambda one: one.p50)
    noise = Noise(best.runs, best.spread, again.p50 / best.p50 if best.p50 else None, others)
    return Measured(best.p50, best.p95 if best.runs >= _LEAST_RUNS else None, noise)
