"""What it costs a request that another submodel answered the one before it, both resident.

Measured on engines that fit the caches together: with larger ones it is the weights of the one that push those of the
other out, which is a matter of the hardware and not of the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from ... import load
from ...runtime.inputs.feeds import random_feeds
from ..harness import Row, milliseconds
from ..subjects import CORES, tiny_bundle

_ROUNDS, _PAIRS = 10, 100


def run() -> list[Row]:
    with load(tiny_bundle(), residency="shared", threads=CORES, preload=True) as model:
        manifest = model.bundle.manifest
        bucket = min(engine.bucket for engine in manifest.engines)
        names = [entry.id for entry in sorted(manifest.submodels, key=lambda entry: entry.parameters)[:2]]
        feeds = random_feeds(manifest.inputs, bucket)

        def calls(name: str) -> Callable[[], Any]:
            return lambda: model(feeds, submodel=name)

        first, second = (calls(name) for name in names)
        rounds = [1e3 * _difference(first, second) for _ in range(_ROUNDS)]
    found = median(rounds)
    return [
        Row(
            "switch of submodel between two requests",
            f"{found:.0f} us (rounds {min(rounds):.0f} to {max(rounds):.0f})",
            "< 50 us",
            found < 50,
            f"a request after one to the other submodel, less the same after one to its own; medians of {_PAIRS} in "
            f"turns, mean of both, median of {_ROUNDS} rounds; 2-layer encoder 64 wide at {bucket.label}, shared",
        )
    ]


def _difference(first: Callable[[], Any], second: Callable[[], Any]) -> float:
    """Milliseconds by which a call takes longer after the other one than after itself, on average over both."""
    after_other: dict[int, list[float]] = {0: [], 1: []}
    after_itself: dict[int, list[float]] = {0: [], 1: []}
    calls = (first, second)
    for _ in range(_PAIRS):
        for mine, other in ((0, 1), (1, 0)):
            calls[other]()
            after_other[mine].append(milliseconds(calls[mine]))
            after_itself[mine].append(milliseconds(calls[mine]))
    return sum(median(after_other[i]) - median(after_itself[i]) for i in (0, 1)) / 2
