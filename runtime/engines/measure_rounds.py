"""Engines timed in turns, each several times: the best round is the figure, and the others say how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...bucket import Bucket
from ...bundle.build_record import LatencyPoint
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.noise import Noise
from ...profiles.host_load import OthersLoad
from ..inputs.arrays import Array
from .measure import latency_stats, times_of
from .runner import Runner

_ROUNDS = 3
# Of a static engine.
_WARMUP_RUNS = 3
_ROUND_SECONDS = 0.3
# In a round of a static engine, and for a percentile.
_LEAST_RUNS = 10
# Of an engine of a range, at each shape: many runs where they are short, one a round at the largest. The first run at a
# shape takes longer, so that its round is not the best.
_SHAPE_SECONDS = 0.01
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
    """Median and 95th percentile of the best round in milliseconds, and how far to trust them; few runs have no
    percentile."""

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
    rounds: list[list[list[float]]] = [[] for _ in timed]
    load = OthersLoad()
    for _ in range(_ROUNDS):
        for each, times in zip(timed, rounds, strict=True):
            times.append(_round(each))
    others = load.share()
    return [_best(times, others) for times in rounds]


def _round(timed: Timed) -> list[float]:
    run = partial(timed.runner.run, timed.feeds)
    if timed.is_static:
        return times_of(run, warmup=_WARMUP_RUNS, min_runs=_LEAST_RUNS, max_seconds=_ROUND_SECONDS)
    return times_of(run, warmup=0, min_runs=1, max_seconds=_SHAPE_SECONDS)


def _best(rounds: Sequence[Sequence[float]], others: float | None) -> Measured:
    """The noise is that of all rounds: the best one of a large shape is a single run."""
    best, again, *_ = sorted(map(latency_stats, rounds), key=lambda one: one.p50)
    every = latency_stats([ms for times in rounds for ms in times])
    noise = Noise(every.runs, every.spread, again.p50 / best.p50 if best.p50 else None, others)
    return Measured(best.p50, best.p95 if best.runs >= _LEAST_RUNS else None, noise)
