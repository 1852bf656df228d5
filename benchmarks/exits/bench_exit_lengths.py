"""The chain with every exit closed against the whole engine of the same model, both on engines of one range."""

from __future__ import annotations

from statistics import median

from ... import load
from ...bucket import Bucket
from ...runtime.exits.choice import OFF
from ...runtime.exits.policy import closed
from ...runtime.inputs.feeds import random_feeds
from ...runtime.model import ElasticModel
from ..harness import Row, interleaved, ratio
from .exit_subject import EXITS, exits_range_bundle

_LENGTHS = (12, 23, 47, 64, 90, 128)
_ROUNDS = {1: 40, 8: 15}


def run() -> list[Row]:
    with load(exits_range_bundle().path, residency="packed") as model:
        return [_row(model, batch) for batch in _ROUNDS]


def _row(model: ElasticModel, batch: int) -> Row:
    slower = {length: _slower(model, Bucket(batch, length)) for length in _LENGTHS}
    middle, worst = median(slower.values()), max(slower, key=lambda length: slower[length])
    return Row(
        f"chain with exits closed over one engine at a free length, batch {batch}",
        f"{middle:.3f}x (worst {slower[worst]:.3f}x at {worst} tokens)",
        "<= 1.03x",
        middle <= 1.03,
        f"median of {len(_LENGTHS)} lengths, {_LENGTHS[0]} to {_LENGTHS[-1]} tokens, each the median ratio of "
        f"{_ROUNDS[batch]} interleaved rounds, slender MiniLM, {len(EXITS)} exits",
    )


def _slower(model: ElasticModel, shape: Bucket) -> float:
    feeds = random_feeds(model.bundle.manifest.inputs, shape)
    feeds["attention_mask"][:] = 1
    policy = closed(len(EXITS))
    calls = {"whole": lambda: model(feeds, exits=OFF), "chain": lambda: model(feeds, exits=policy)}
    return 1 / ratio(interleaved(calls, _ROUNDS[shape.batch]), "whole", "chain")
