"""Predicted latency of every rung on this host, after the compile's own correction, against measured."""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median

from ...runtime.bundle import open_bundle
from ...runtime.feeds import random_feeds
from ...runtime.measure import measure
from ...runtime.runner import runner_for
from .harness import Row
from .subjects import CORES, minilm_bundle

_ROUNDS = 4


def run() -> list[Row]:
    bundle = open_bundle(minilm_bundle())
    predicted = {latency.engine: latency.predicted_ms for latency in bundle.build.latencies}
    engines = bundle.manifest.engines
    best = dict.fromkeys(predicted, float("inf"))
    with ExitStack() as stack:
        runners = {e.id: stack.enter_context(runner_for(bundle, e, "packed", CORES)) for e in engines}
        for _ in range(_ROUNDS):
            for engine in engines:
                feeds = random_feeds(bundle.manifest.inputs, engine.bucket)
                stats = measure(runners[engine.id], feeds, min_runs=15, max_seconds=0.2)
                best[engine.id] = min(best[engine.id], stats.p50)
    errors = [abs(predicted[engine.id] / best[engine.id] - 1) for engine in engines]
    return [
        Row(
            f"predicted latency, {len(engines)} MiniLM engines",
            f"median {median(errors):.1%}, worst {max(errors):.1%} off",
            "median < 10 %, worst < 25 %",
            median(errors) < 0.10 and max(errors) < 0.25,
            f"every rung at every bucket of host-cpu, best median of {_ROUNDS} interleaved rounds",
        )
    ]
