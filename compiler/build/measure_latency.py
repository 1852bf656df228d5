"""Latencies measured on this host: of a few rungs, to correct predictions, and of every engine, for the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from ...elastic import Bucket, Submodel
from ...profiles.precision import PRECISIONS, Precision, precision_of
from ...profiles.probe_host import is_this_host
from ...runtime.bundle.manifest import EngineEntry, Latency, LatencyPoint
from ...runtime.engines.measure import LatencyStats, measure
from ...runtime.engines.runner import Residency
from ...runtime.inputs.feeds import random_feeds
from ..planning.cost_model import Cost, fit_correction, predict
from ..planning.plan import Corrections
from ..planning.variants import variant_workload
from ..work.clock import Clock
from .build_engine import EngineBuilder

# Spread over the ladder; the correction has three factors, so four rungs leave it one to disagree with.
_RUNGS_MEASURED = 4
_ROUNDS_MEASURED = 3
_ROUND_SECONDS = 0.3
# In a round of a static engine, and for a percentile.
_LEAST_RUNS = 10
# Of an engine of a range, at each shape; the largest takes long enough by itself.
_SHAPE_SECONDS = 0.08
_SHAPE_ROUNDS = 2
_SHAPE_RUNS = 3
_SMALL_SEQUENCE = 16
_MIDDLE_SEQUENCE = 128
# Whole engines that are open at once while they are measured: each owns a packed copy of its weights.
_ENGINES_OPEN_AT_ONCE = 4
# What the runtime chooses while memory lasts.
_MEASURED_RESIDENCY: Residency = "packed"


def fit_rungs(builder: EngineBuilder, rungs: Sequence[Submodel], clock: Clock) -> Corrections:
    """Corrections per bucket and precision, from some of ``rungs`` built and measured here; empty for a profile of
    another device.

    A rung of another sequence is measured at the shape that it has in the place of the bucket.
    """
    if not is_this_host(builder.profile):
        return {}
    picked, profile = [rungs[index] for index in rungs_to_measure(len(rungs))], builder.profile
    pairs = [(bucket, precision) for bucket in profile.buckets for precision in profile.precisions]
    corrections = {}
    for bucket, precision in clock.each(pairs):
        own = [rung.at_bits(PRECISIONS[precision].bits) for rung in picked]
        costs = [_cost(builder, rung, shape) for rung in own for shape in _fitted_shapes(rung.at(bucket))]
        corrections[bucket, precision] = fit_correction(costs, _measured_rungs(builder, own, bucket, precision))
    return corrections


def shapes_to_measure(bucket: Bucket) -> list[Bucket]:
    """The shapes at which an engine of a range is measured: its ends, and the powers of two of its sequence between,
    at the least and the most rows."""
    batches = sorted({bucket.smallest.batch, bucket.batch})
    return [Bucket(batch, sequence) for batch in batches for sequence in bucket.doublings]


def _fitted_shapes(bucket: Bucket) -> list[Bucket]:
    """Where rungs are measured: of a range at three lengths and with many rows, which tell the parts of a run apart."""
    if bucket.is_static:
        return [bucket]
    sizes = (Bucket(1, _SMALL_SEQUENCE), Bucket(1, _MIDDLE_SEQUENCE), Bucket(1, bucket.sequence))
    many = Bucket(bucket.batch, _SMALL_SEQUENCE)
    return list(dict.fromkeys(bucket.nearest(size) for size in (*sizes, many)))


def rungs_to_measure(count: int) -> list[int]:
    """Which of ``count`` rungs are measured: the ends and some between, evenly."""
    return sorted({round(index * (count - 1) / (_RUNGS_MEASURED - 1)) for index in range(_RUNGS_MEASURED)})


def measure_engines(
    builder: EngineBuilder, engines: Sequence[EngineEntry], corrections: Corrections, clock: Clock
) -> tuple[Latency, ...]:
    """Predicted latency of every engine, and beside it the measured one if the profile is of this host.

    Engines of one file are one engine, measured once.
    """
    measured: dict[str, list[tuple[float, float | None]]] = {}
    if is_this_host(builder.profile):
        for group in clock.each(_groups(engines)):
            stats = builder.stage.once_json(f"latency-{group[0].file}.json", partial(_measured_groups, builder, group))
            measured |= {engine.file: figures for engine, figures in zip(group, stats, strict=True)}
    return tuple(_latency(builder, engine, corrections, measured.get(engine.file)) for engine in engines)


def _latency(
    builder: EngineBuilder,
    engine: EngineEntry,
    corrections: Corrections,
    measured: Sequence[tuple[float, float | None]] | None,
) -> Latency:
    """What is known of ``engine``; ``measured`` are medians and 95th percentiles at its shapes, in order."""
    points = [
        LatencyPoint(
            shape.batch,
            shape.sequence,
            _predicted(builder, engine, shape, corrections),
            *(measured[number] if measured else (None, None)),
        )
        for number, shape in enumerate(_shapes(engine))
    ]
    largest = points[-1]
    return Latency(
        engine=engine.id,
        predicted_ms=largest.predicted_ms,
        measured_p50_ms=largest.measured_p50_ms,
        measured_p95_ms=largest.measured_p95_ms,
        residency=_MEASURED_RESIDENCY if measured else None,
        points=None if engine.bucket.is_static else tuple(points),
    )


def _shapes(engine: EngineEntry) -> list[Bucket]:
    return [engine.bucket] if engine.bucket.is_static else shapes_to_measure(engine.bucket)


def _measured_groups(builder: EngineBuilder, engines: Sequence[EngineEntry]) -> list[list[tuple[float, float | None]]]:
    """Per engine the medians and 95th percentiles at its shapes."""
    pairs = [(engine, shape) for engine in engines for shape in _shapes(engine)]
    stats = iter(_best_of_rounds(builder, pairs))
    return [[next(stats) for _ in _shapes(engine)] for engine in engines]


def _groups(engines: Sequence[EngineEntry]) -> list[list[EngineEntry]]:
    """Engines that are measured in turns: all buckets of a segment, since the chain weighs those against each other."""
    files = list({engine.file: engine for engine in engines}.values())
    wholes = [engine for engine in files if engine.segment is None]
    groups = [wholes[start : start + _ENGINES_OPEN_AT_ONCE] for start in range(0, len(wholes), _ENGINES_OPEN_AT_ONCE)]
    segments: dict[str, list[EngineEntry]] = {}
    for engine in files:
        if engine.segment is not None:
            segments.setdefault(engine.file.removesuffix(f".{engine.bucket.label}.onnx"), []).append(engine)
    return [*groups, *segments.values()]


def _predicted(builder: EngineBuilder, engine: EngineEntry, shape: Bucket, corrections: Corrections) -> float:
    """Milliseconds of ``engine`` at ``shape``, corrected where rungs were measured."""
    source = builder.universal.source
    submodel = source.spec.parse(engine.submodel)
    cost = _cost(builder, submodel, shape, engine.segment)
    if not corrections:
        return cost.predicted_ms
    # The first bucket of the profile that the submodel has as this one.
    measured = next(bucket for bucket in builder.profile.buckets if submodel.at(bucket) == engine.bucket)
    return corrections[measured, engine.precision].corrected_ms(cost)


def _cost(builder: EngineBuilder, submodel: Submodel, bucket: Bucket, segment: str | None = None) -> Cost:
    """Of the engine of ``submodel`` at ``bucket``, or of one segment of it."""
    source, profile = builder.universal.source, builder.profile
    if segment is None or source.exits is None:
        ops = variant_workload(source, submodel, bucket, profile)
    else:
        names = [entry.name for entry in source.exits.entry.segments]
        ops = source.exits.workload(submodel, bucket, names.index(segment))
    return predict(ops, profile, precision_of(submodel, profile.precisions))


def _measured_rungs(
    builder: EngineBuilder, rungs: Sequence[Submodel], bucket: Bucket, precision: Precision
) -> list[float]:
    """Latency of each rung in milliseconds; an interrupted compile measures once, so that its plan stays the same."""

    def measure_now() -> list[float]:
        engines = [builder.build(rung, rung.at(bucket)) for rung in rungs]
        pairs = [(engine, shape) for engine in engines for shape in _fitted_shapes(engine.bucket)]
        return [p50 for p50, _ in _best_of_rounds(builder, pairs)]

    times: list[float] = builder.stage.once_json(f"rungs-{bucket.label}-{precision}.json", measure_now)
    return times


def _best_of_rounds(
    builder: EngineBuilder, pairs: Sequence[tuple[EngineEntry, Bucket]]
) -> list[tuple[float, float | None]]:
    """Median and 95th percentile in milliseconds of each engine at a shape in its best of several rounds, all in turn.

    Another program's burst then spoils a round of some engines, not the proportions between them. Few runs have no
    percentile.
    """
    interface = builder.draft.manifest.interface
    rounds: list[list[LatencyStats]] = [[] for _ in pairs]
    with ExitStack() as stack:
        runners = {
            engine.id: stack.enter_context(builder.runner(engine, _MEASURED_RESIDENCY))
            for engine in {engine.id: engine for engine, _ in pairs}.values()
        }
        feeds = [random_feeds(interface(engine.segment)[0], shape) for engine, shape in pairs]
        for number in range(_ROUNDS_MEASURED):
            for (engine, _), own, stats in zip(pairs, feeds, rounds, strict=True):
                runner = runners[engine.id]
                if engine.bucket.is_static:
                    stats.append(measure(runner, own, min_runs=_LEAST_RUNS, max_seconds=_ROUND_SECONDS))
                elif number < _SHAPE_ROUNDS:
                    stats.append(measure(runner, own, warmup=1, min_runs=_SHAPE_RUNS, max_seconds=_SHAPE_SECONDS))
    best = [min(stats, key=lambda one: one.p50) for stats in rounds]
    return [(one.p50, one.p95 if one.runs >= _LEAST_RUNS else None) for one in best]
