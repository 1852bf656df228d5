"""The cost model after its correction by a few measured rungs, against every rung of the ladder."""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median

from ...bundle.open_bundle import Bundle, open_bundle
from ...compiler.engines.measure_latency import rungs_to_measure
from ...compiler.planning.cost_model import fit_correction, predict
from ...examples.encoder.corpus import demo_checkpoint
from ...exporters.source import open_source
from ...profiles.probe_host import host_profile
from ...runtime.engines.measure import measure
from ...runtime.engines.runner import runner_for
from ...runtime.inputs.feeds import random_feeds
from ..harness import Row
from ..subjects import CORES, minilm_bundle

_ROUNDS = 5


def run() -> list[Row]:
    """Rungs are measured and predicted in one run: a machine that changes its speed from hour to hour is no evidence
    about the model."""
    bundle, source, profile = open_bundle(minilm_bundle()), open_source(demo_checkpoint()), host_profile()
    measured = _measure(bundle)
    errors = []
    for bucket in dict.fromkeys(engine.bucket for engine in bundle.manifest.engines):
        engines = [engine for engine in bundle.manifest.engines if engine.bucket == bucket]
        costs = [predict(source.workload(source.spec.parse(e.submodel), bucket), profile) for e in engines]
        times = [measured[engine.id] for engine in engines]
        fitted = rungs_to_measure(len(engines))
        correction = fit_correction([costs[i] for i in fitted], [times[i] for i in fitted])
        errors += [
            abs(correction.corrected_ms(cost) / time - 1)
            for index, (cost, time) in enumerate(zip(costs, times, strict=True))
            if index not in fitted
        ]
    return [
        Row(
            f"predicted latency, {len(errors)} MiniLM engines",
            f"median {median(errors):.1%}, worst {max(errors):.1%} off",
            "median < 10 %, worst < 25 %",
            median(errors) < 0.10 and max(errors) < 0.25,
            f"every rung at every bucket but those fitted to, best median of {_ROUNDS} interleaved rounds",
        )
    ]


def _measure(bundle: Bundle) -> dict[str, float]:
    """Milliseconds of every engine, packed, all in turn."""
    best = {engine.id: float("inf") for engine in bundle.manifest.engines}
    with ExitStack() as stack:
        runners = {e.id: stack.enter_context(runner_for(bundle, e, "packed", CORES)) for e in bundle.manifest.engines}
        for _ in range(_ROUNDS):
            for engine in bundle.manifest.engines:
                feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
                stats = measure(runners[engine.id], feeds, min_runs=15, max_seconds=0.2)
                best[engine.id] = min(best[engine.id], stats.p50)
    return best
