"""Measurements of engines: latencies on this host, of a few rungs, to correct predictions, and of every engine, for
the dispatcher; and how much of the universal model a submodel keeps, on texts or rows that no stage has seen."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from ...bucket import Bucket
from ...bundle.build_record import Latency, LatencyPoint
from ...bundle.entries.engine_entry import EngineEntry, Segment, Whole
from ...bundle.manifest import Quality
from ...elastic import Submodel
from ...profiles.precision import Precision, in_precision
from ...profiles.probe_host import is_this_host
from ...runtime.consistency.measure import measure
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.measure import (
    Measured,
    Timed,
    best_of_rounds,
    measured_shapes,
    measured_together,
    with_measured,
)
from ...runtime.engines.residency import Residency
from ...runtime.inputs.arrays import random_feeds
from ...workload import Op
from ..examples.corpus import ArrayCorpus, Corpus, samples_of
from ..graph.precision.proof_graphs import in_onnx_runtime
from ..planning.candidate import Corrections, variant_workload
from ..planning.cost_model import Cost, fit_correction, predict
from ..work.clock import Clock
from .build_engine import EngineBuilder
from .fp32_reference import Fp32Reference

# Spread over the ladder; the correction has three factors, so four rungs leave it one to disagree with.
_RUNGS_MEASURED = 4
# Shapes of an engine of a range at which rungs are measured.
_SMALL_SEQUENCE = 16
_MIDDLE_SEQUENCE = 128
# The runtime's choice while memory lasts.
_MEASURED_RESIDENCY: Residency = "packed"


def fit_rungs(
    builder: EngineBuilder, rungs: Sequence[Submodel], included: Collection[str], clock: Clock
) -> Corrections:
    """Corrections per bucket and precision, from some of ``rungs`` built and measured here; empty for a profile of
    another device.

    Rungs all over the ladder where a budget limits latency, since these figures choose its submodel; else of the
    ``included`` ones (ids), which are built in any case, and are timed here for good. A rung of another sequence is
    measured at the shape that it has in the place of the bucket.
    """
    profile = builder.profile
    if not is_this_host(profile):
        return {}
    if all(budget.latency_ms is None for budget in profile.budgets.values()):
        rungs = [rung for rung in rungs if rung.id in included]
    picked = [rungs[index] for index in rungs_to_measure(len(rungs))]
    pairs = [(bucket, precision) for bucket in profile.buckets for precision in profile.precisions]
    corrections = {}
    for bucket, precision in clock.each(pairs):
        own = [in_precision(rung, precision, profile.precisions) for rung in picked]
        costs = [_cost(builder, rung, shape, precision) for rung in own for shape in _fitted_shapes(rung.at(bucket))]
        measured_ms = _measured_rungs(builder, own, included, bucket, precision)
        corrections[bucket, precision] = fit_correction(costs, measured_ms)
    return corrections


def _fitted_shapes(bucket: Bucket) -> list[Bucket]:
    """Where corrections are fitted: of a range at three lengths and with many rows, all of them timed, which tell the
    parts of a run apart."""
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

    Engines of one file are one engine, and a rung is the engine that it became: each is timed once. The time of a
    step on a cache depends on the text, and is measured as the model generates.
    """
    engines = [engine for engine in engines if isinstance(engine.kind, Whole | Segment)]
    measured: dict[str, list[Measured]] = {}
    if is_this_host(builder.profile):
        for group in clock.each(measured_together(engines)):
            pairs = [(engine, shape) for engine in group for shape in measured_shapes(engine.bucket)]
            for (engine, _), figures in zip(pairs, _measured(builder, pairs), strict=True):
                measured.setdefault(engine.file, []).append(figures)
    return tuple(_latency(builder, engine, corrections, measured.get(engine.file)) for engine in engines)


def _latency(
    builder: EngineBuilder,
    engine: EngineEntry,
    corrections: Corrections,
    measured: Sequence[Measured] | None,
) -> Latency:
    """Latencies of ``engine``; ``measured`` are the figures at its shapes, in order."""
    points = []
    for number, shape in enumerate(measured_shapes(engine.bucket)):
        point = LatencyPoint(shape.batch, shape.sequence, _predicted(builder, engine, shape, corrections))
        points.append(with_measured(point, measured[number]) if measured else point)
    return Latency(engine.id, tuple(points), _MEASURED_RESIDENCY if measured else None)


def _predicted(builder: EngineBuilder, engine: EngineEntry, shape: Bucket, corrections: Corrections) -> float:
    """Milliseconds of ``engine`` at ``shape``, corrected where rungs were measured."""
    source = builder.universal.source
    submodel = source.spec.parse(engine.submodel)
    cost = _cost(builder, submodel, shape, engine.precision, engine.segment)
    if not corrections:
        return cost.predicted_ms
    # The first bucket of the profile that the submodel has as this one.
    measured = next(bucket for bucket in builder.profile.buckets if submodel.at(bucket) == engine.bucket)
    return corrections[measured, engine.precision].corrected_ms(cost)


def _cost(
    builder: EngineBuilder, submodel: Submodel, bucket: Bucket, precision: Precision, segment: str | None = None
) -> Cost:
    """Time in ``precision`` of the engine of ``submodel`` at ``bucket``, or of one segment of it."""
    source, profile = builder.source, builder.profile
    if segment is None:
        ops: Sequence[Op] = variant_workload(source, submodel, bucket, profile)
    else:
        ops = source.parts[segment].workload(submodel, bucket)
    return predict(ops, profile, precision)


def _measured_rungs(
    builder: EngineBuilder,
    rungs: Sequence[Submodel],
    included: Collection[str],
    bucket: Bucket,
    precision: Precision,
) -> tuple[float, ...]:
    """Latency of each rung in milliseconds; an interrupted compile builds none again, so that its plan stays the same
    and no engine is left that the manifest does not have."""

    def measure_now() -> tuple[float, ...]:
        engines = [builder.build(rung, rung.at(bucket)) for rung in rungs]
        pairs = [
            (engine, shape)
            for engine in engines
            for shape in (measured_shapes if engine.submodel in included else _fitted_shapes)(engine.bucket)
        ]
        figures = zip(pairs, _measured(builder, pairs), strict=True)
        p50_ms = {(engine.id, shape): one.p50_ms for (engine, shape), one in figures}
        return tuple(p50_ms[engine.id, shape] for engine in engines for shape in _fitted_shapes(engine.bucket))

    return builder.stage.memo(f"rungs-{bucket.label}-{precision}", tuple[float, ...], measure_now)


def _measured(builder: EngineBuilder, pairs: Sequence[tuple[EngineEntry, Bucket]]) -> list[Measured]:
    """Each engine at a shape. Those that were not timed before are timed now, all in turn; a chosen rung was, and an
    interrupted compile goes on with the figures that it has."""
    keys = [f"latency-{engine.file}-{shape.label}" for engine, shape in pairs]
    left = [pair for pair, key in zip(pairs, keys, strict=True) if not builder.stage.has(key)]
    timed = iter(_timed(builder, left))
    return [builder.stage.memo(key, Measured, lambda: next(timed)) for key in keys]


def _timed(builder: EngineBuilder, pairs: Sequence[tuple[EngineEntry, Bucket]]) -> list[Measured]:
    """Each engine at a shape, all in turn."""
    interface = builder.bundle.manifest.interface_of
    with ExitStack() as stack:
        runners = {
            engine.id: stack.enter_context(builder.runner(engine, _MEASURED_RESIDENCY))
            for engine in {engine.id: engine for engine, _ in pairs}.values()
        }
        return best_of_rounds(
            [
                Timed(runners[engine.id], random_feeds(interface(engine)[0], shape), engine.bucket.is_static)
                for engine, shape in pairs
            ]
        )


def measure_quality(
    builder: EngineBuilder,
    engines: Sequence[EngineEntry],
    corpus: Corpus | ArrayCorpus | None,
    clock: Clock,
    fp32: Fp32Reference | None = None,
) -> Mapping[str, Quality]:
    """Quality of every submodel against the universal model on what was held out; empty without data.

    Measured at the bucket with the longest sequence, to which texts are truncated for both models alike. A submodel of
    a shorter sequence runs at its own, the universal model at the bucket's, on the samples that fit the shorter: the
    requests that it may answer; it has no quality if none fits. The universal model computes in float32, in an engine
    of the bundle or in ``fp32``. Figures of an earlier run are kept.
    """
    samples = samples_of(corpus, "held_out", builder.universal.source.encoder)
    if samples is None:
        return {}
    spec, stage = builder.universal.spec, builder.stage
    bucket = max(builder.profile.buckets, key=lambda b: (b.sequence, -b.batch))
    universal = fp32.engine if fp32 else in_onnx_runtime(builder.build(spec.universal(), bucket))
    largest = [e for e in engines if isinstance(e.kind, Whole) and e.bucket == spec.parse(e.submodel).at(bucket)]
    wholes = [in_onnx_runtime(engine) for engine in largest]
    missing = [engine for engine in wholes if not stage.has(_quality_key(engine))]
    reference = fp32.bundle if fp32 else builder.proofs
    measured = measure(builder.proofs, universal, missing, samples, threads_or_default(None), clock.tick, reference)
    found: dict[str, Quality] = {}
    for engine, quality in measured:
        found[key := _quality_key(engine)] = quality
        stage.memo(key, Quality, partial(found.__getitem__, key))
    keys = [(engine.submodel, _quality_key(engine)) for engine in wholes]
    return {name: stage.memo(key, Quality, partial(found.__getitem__, key)) for name, key in keys if stage.has(key)}


def _quality_key(engine: EngineEntry) -> str:
    return f"quality-{engine.file}"
