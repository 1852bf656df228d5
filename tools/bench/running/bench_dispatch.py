"""What a request costs beside the engine's run: checks, choice, padding, the answer."""

from __future__ import annotations

from statistics import median

from .... import load
from ....runtime.inputs.feeds import random_feeds
from ..harness import Row, milliseconds
from ..subjects import CORES, minilm_bundle

_ROUNDS, _PAIRS = 10, 200


def run() -> list[Row]:
    with load(minilm_bundle(), residency="packed", threads=CORES) as model:
        engine = min(model.bundle.manifest.engines, key=lambda e: e.flops)
        feeds = random_feeds(model.bundle.manifest.inputs, engine.bucket)
        model(feeds, submodel=engine.submodel)
        raw = model._pool.get(engine)  # the very session that answers, so that only the request differs

        def difference() -> float:
            alone = milliseconds(lambda: raw.run(feeds))
            return 1e3 * (milliseconds(lambda: model(feeds, submodel=engine.submodel)) - alone)

        rounds = [median(difference() for _ in range(_PAIRS)) for _ in range(_ROUNDS)]
    overhead = min(rounds)
    return [
        Row(
            "dispatch over session.run",
            f"{overhead:.0f} us (median round {median(rounds):.0f} us)",
            "< 50 us",
            overhead < 50,
            f"best of {_ROUNDS} rounds, each the median difference of {_PAIRS} pairs on one session; "
            "smallest MiniLM engine at 1x32",
        )
    ]
