"""Requests: what an answer costs beside its engine, and what a change of the submodel does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from .. import load
from ..runtime.inputs.arrays import random_feeds
from .harness import Row, benchmark, milliseconds
from .subjects import CORES, minilm_bundle, tiny_bundle

_DISPATCH_ROUNDS, _DISPATCH_PAIRS = 20, 200
_WARM_US, _AFTER_RUN_US = 20, 60


@benchmark
def bench_dispatch() -> list[Row]:
    """Cost of a request beside the engine's run: checks, choice, padding, the answer."""
    cases = (
        ("warm (an engine of 2 layers of 64)", tiny_bundle(), 1, _WARM_US),
        ("after a run (smallest MiniLM engine at 1x32)", minilm_bundle(), CORES, _AFTER_RUN_US),
    )
    rows = []
    for name, bundle, threads, bar in cases:
        rounds = _rounds(bundle, threads)
        rows.append(
            Row(
                f"dispatch over session.run, {name}",
                f"{median(rounds):.0f} us ({min(rounds):.0f} to {max(rounds):.0f})",
                f"< {bar} us",
                median(rounds) < bar,
                f"median of {_DISPATCH_ROUNDS} rounds, each the median of {_DISPATCH_PAIRS} pairs on one session",
            )
        )
    return rows


def _rounds(bundle: Path, threads: int) -> list[float]:
    """Microseconds that a request takes beyond the run of the smallest engine, of each round."""
    with load(bundle, residency="packed", threads=threads) as model:
        engine = min(model.bundle.manifest.engines, key=lambda e: e.flops)
        inputs = model.bundle.manifest.inputs
        feeds = random_feeds(inputs, engine.bucket)
        feeds |= {spec.name: np.ones_like(feeds[spec.name]) for spec in inputs if spec.row_needs}  # no padding
        model(feeds, submodel=engine.submodel)
        raw = model._pool.get(engine)  # the very session that answers, so that only the request differs

        def difference() -> float:
            alone = milliseconds(lambda: raw.run(feeds))
            return 1e3 * (milliseconds(lambda: model(feeds, submodel=engine.submodel)) - alone)

        return [median(difference() for _ in range(_DISPATCH_PAIRS)) for _ in range(_DISPATCH_ROUNDS)]


_SWITCH_ROUNDS, _SWITCH_PAIRS = 10, 100


@benchmark
def bench_switch() -> list[Row]:
    """Cost to a request that another submodel answered the one before it, both resident.

    Measured on engines that fit the caches together: with larger ones the weights of the one push those of the
    other out, which is a matter of the hardware and not of the choice."""
    with load(tiny_bundle(), residency="shared", threads=CORES, preload=True) as model:
        manifest = model.bundle.manifest
        bucket = min(engine.bucket for engine in manifest.engines)
        names = [entry.id for entry in sorted(manifest.submodels, key=lambda entry: entry.parameters)[:2]]
        feeds = random_feeds(manifest.inputs, bucket)

        def calls(name: str) -> Callable[[], Any]:
            return lambda: model(feeds, submodel=name)

        first, second = (calls(name) for name in names)
        rounds = [1e3 * _difference(first, second) for _ in range(_SWITCH_ROUNDS)]
    found = median(rounds)
    return [
        Row(
            "switch of submodel between two requests",
            f"{found:.0f} us (rounds {min(rounds):.0f} to {max(rounds):.0f})",
            "< 50 us",
            found < 50,
            f"a request after one to the other submodel, less one after its own; medians of {_SWITCH_PAIRS} in "
            f"turns, mean of both, median of {_SWITCH_ROUNDS} rounds; 2 layers of 64 at {bucket.label}, shared",
        )
    ]


def _difference(first: Callable[[], Any], second: Callable[[], Any]) -> float:
    """Milliseconds by which a call takes longer after the other one than after itself, on average over both."""
    after_other: dict[int, list[float]] = {0: [], 1: []}
    after_itself: dict[int, list[float]] = {0: [], 1: []}
    calls = (first, second)
    for _ in range(_SWITCH_PAIRS):
        for mine, other in ((0, 1), (1, 0)):
            calls[other]()
            after_other[mine].append(milliseconds(calls[mine]))
            after_itself[mine].append(milliseconds(calls[mine]))
    return sum(median(after_other[i]) - median(after_itself[i]) for i in (0, 1)) / 2
