"""Latencies measured on this host: of a few rungs, to correct predictions, and of every engine, for the dispatcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from ..elastic import Bucket, Submodel
from ..profiles.probe_host import is_this_host
from ..runtime.feeds import random_feeds
from ..runtime.manifest import EngineEntry, Latency
from ..runtime.measure import measure
from ..runtime.runner import Residency, Runner, runner_for
from .build_engine import EngineBuilder
from .clock import Clock
from .cost_model import Correction, fit_correction, predict
from .levels import Level
from .plan import Plan, ladder

# Spread over the ladder; the correction has three factors, so four rungs leave it one to disagree with.
_RUNGS = 4
_ROUNDS = 3
_ROUND_SECONDS = 0.3
_SECONDS = 1.0
# What the runtime chooses while memory lasts.
_RESIDENCY: Residency = "packed"


def fit_rungs(builder: EngineBuilder, levels: Sequence[Level], clock: Clock) -> Mapping[Bucket, Correction]:
    """Corrections per bucket, from rungs built and measured here; empty if the profile is of another device."""
    if not is_this_host(builder.profile):
        return {}
    rungs = ladder(levels)
    picked = sorted({round(index * (len(rungs) - 1) / (_RUNGS - 1)) for index in range(_RUNGS)})
    return {
        bucket: fit_correction(
            [predict(builder.universal.source.workload(rungs[i], bucket), builder.profile) for i in picked],
            _measured_rungs(builder, [rungs[i] for i in picked], bucket),
        )
        for bucket in clock.each(builder.profile.buckets)
    }


def measure_engines(
    builder: EngineBuilder, engines: Sequence[EngineEntry], plan: Plan, clock: Clock
) -> tuple[Latency, ...]:
    """Predicted latency of every engine, and beside it the measured one if the profile is of this host."""
    costs = {(candidate.id, cost.bucket): cost for candidate in plan.candidates for cost in candidate.costs}
    here = is_this_host(builder.profile)
    latencies = []
    for engine in clock.each(engines):
        p50, p95 = _measured(builder, engine) if here else (None, None)
        latencies.append(
            Latency(
                engine=engine.id,
                predicted_ms=costs[engine.submodel, engine.bucket].latency_ms,
                measured_p50_ms=p50,
                measured_p95_ms=p95,
                residency=_RESIDENCY if here else None,
            )
        )
    return tuple(latencies)


def _measured_rungs(builder: EngineBuilder, rungs: Sequence[Submodel], bucket: Bucket) -> list[float]:
    """Latency of each rung in milliseconds; an interrupted compile measures once, so that its plan stays the same."""

    def measure_now() -> list[float]:
        return _best_of_rounds(builder, [builder.build(rung, bucket) for rung in rungs])

    return builder.stage.once_json(f"rungs-{bucket.label}.json", measure_now)  # type: ignore[no-any-return]


def _best_of_rounds(builder: EngineBuilder, engines: Sequence[EngineEntry]) -> list[float]:
    """Median latency in milliseconds of each engine in its best of several rounds, all engines in turn.

    Another program's burst then spoils a round of some engines, not the proportions that a correction is fitted to.
    """
    with ExitStack() as stack:
        runners = [stack.enter_context(_runner(builder, engine)) for engine in engines]
        feeds = [random_feeds(builder.draft.manifest.inputs, engine.bucket) for engine in engines]
        rounds = [
            [
                measure(runner, feed, min_runs=10, max_seconds=_ROUND_SECONDS).p50
                for runner, feed in zip(runners, feeds, strict=True)
            ]
            for _ in range(_ROUNDS)
        ]
    return [min(times) for times in zip(*rounds, strict=True)]


def _measured(builder: EngineBuilder, engine: EngineEntry) -> tuple[float, float]:
    """Median and 95th percentile in milliseconds."""

    def measure_now() -> list[float]:
        with _runner(builder, engine) as runner:
            feeds = random_feeds(builder.draft.manifest.inputs, engine.bucket)
            stats = measure(runner, feeds, max_seconds=_SECONDS)
        return [stats.p50, stats.p95]

    p50, p95 = builder.stage.once_json(f"latency-{engine.file}.json", measure_now)
    return p50, p95


def _runner(builder: EngineBuilder, engine: EngineEntry) -> Runner:
    return runner_for(builder.draft, engine, _RESIDENCY, builder.profile.cores)
