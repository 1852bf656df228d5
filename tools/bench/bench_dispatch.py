"""What a request costs beside the engine's run: checks, choice, padding, the answer."""

from __future__ import annotations

from statistics import median

from ... import load
from ...runtime.feeds import random_feeds
from .harness import Row, milliseconds
from .subjects import default_session, minilm_bundle

_PAIRS = 400


def run() -> list[Row]:
    with load(minilm_bundle(), residency="packed") as model:
        engine = min(model.bundle.manifest.engines, key=lambda e: e.flops)
        feeds = random_feeds(model.bundle.manifest.inputs, engine.bucket)
        session = default_session(model.bundle.file(engine.file))
        differences = []
        for _ in range(_PAIRS):
            raw = milliseconds(lambda: session.run(None, feeds))
            asked = milliseconds(lambda: model(feeds, submodel=engine.submodel))
            differences.append(1e3 * (asked - raw))
        inside = []
        for _ in range(_PAIRS):
            answers = []
            wall = milliseconds(lambda: answers.append(model(feeds, latency_ms=1e6)))  # noqa: B023
            inside.append(1e3 * (wall - answers[0].timings.run))
    overhead = max(median(differences), median(inside))
    return [
        Row(
            "dispatch over session.run",
            f"{overhead:.0f} us ({median(differences):.0f} against a raw session in turn, "
            f"{median(inside):.0f} around the run itself)",
            "< 50 us",
            overhead < 50,
            f"median of {_PAIRS} requests each, smallest MiniLM engine at 1x32; the larger of the two",
        )
    ]
