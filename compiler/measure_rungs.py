"""Latencies measured on this host: of a few rungs, to correct predictions, and of every engine, for the dispatcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from ..elastic import Bucket
from ..profiles.probe_host import is_this_host
from ..runtime.feeds import random_feeds
from ..runtime.manifest import EngineEntry, Latency
from ..runtime.measure import LatencyStats, measure
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
            _best_of_rounds(builder, [builder.build(rungs[i], bucket) for i in picked]),
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
        stats = _measured(builder, engine) if here else None
        latencies.append(
            Latency(
                engine=engine.id,
                predicted_ms=costs[engine.submodel, engine.bucket].latency_ms,
                measured_p50_ms=stats.p50 if stats else None,
                measured_p95_ms=stats.p95 if stats else None,
                residency=_RESIDENCY if stats else None,
            )
        )
    return tuple(latencies)


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


def _measured(builder: EngineBuilder, engine: EngineEntry) -> LatencyStats:
    with _runner(builder, engine) as runner:
        return measure(runner, random_feeds(builder.draft.manifest.inputs, engine.bucket), max_seconds=_SECONDS)


def _runner(builder: EngineBuilder, engine: EngineEntry) -> Runner:
    return runner_for(builder.draft, engine, _RESIDENCY, builder.profile.cores)
