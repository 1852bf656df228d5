"""What a request costs beside the engine's run: checks, choice, padding, the answer."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np

from ... import load
from ...runtime.inputs.feeds import random_feeds
from ..harness import Row, milliseconds
from ..subjects import CORES, minilm_bundle, tiny_bundle

_ROUNDS, _PAIRS = 20, 200
_WARM_US, _AFTER_RUN_US = 20, 60


def run() -> list[Row]:
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
                f"median of {_ROUNDS} rounds, each the median difference of {_PAIRS} pairs on one session",
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

        return [median(difference() for _ in range(_PAIRS)) for _ in range(_ROUNDS)]
