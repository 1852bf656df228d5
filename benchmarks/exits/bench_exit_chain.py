"""The chain with every exit closed against the monolithic engine of the same model."""

from __future__ import annotations

from ... import load
from ...bucket import Bucket
from ...runtime.exits.choice import OFF
from ...runtime.exits.policy import closed
from ...runtime.inputs.feeds import random_feeds
from ...runtime.model import ElasticModel
from ..harness import Row, interleaved, ratio
from .exit_subject import BATCHES, EXITS, LONGEST, exits_bundle

_ROUNDS = {1: 60, 8: 30, 32: 15}


def run() -> list[Row]:
    bundle = exits_bundle()
    with load(bundle.path, residency="packed") as model:
        return [_row(model, batch) for batch in BATCHES]


def _row(model: ElasticModel, batch: int) -> Row:
    feeds = random_feeds(model.bundle.manifest.inputs, Bucket(batch, LONGEST))
    feeds["attention_mask"][:] = 1
    policy = closed(len(EXITS))
    calls = {"whole": lambda: model(feeds, exits=OFF), "chain": lambda: model(feeds, exits=policy)}
    times = interleaved(calls, _ROUNDS[batch])
    slower = 1 / ratio(times, "whole", "chain")
    return Row(
        f"chain with exits closed over one engine, batch {batch}",
        f"{slower:.3f}x (best {min(times['chain']):.2f} against {min(times['whole']):.2f} ms)",
        "<= 1.03x",
        slower <= 1.03,
        f"median ratio of {_ROUNDS[batch]} interleaved rounds, slender MiniLM, {len(EXITS)} exits, {LONGEST} tokens",
    )
