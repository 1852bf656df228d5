"""Tokens a second of one row with drafts over those without, on random weights: what a draft and its checks take is
real, how much of it is accepted says nothing of a trained model."""

from __future__ import annotations

from statistics import median
from time import sleep
from typing import Any

import numpy as np

from ... import load
from ...runtime.generation.calls.generated import DraftedTokens, GeneratedRow
from ...runtime.model import ElasticModel
from ..harness import Row
from ..subjects import CORES
from .subject import llama_halves_bundle

_ROUNDS, _PAUSE = 7, 0.3
_PROMPT, _NEW = 64, 64
_WAYS: dict[str, dict[str, Any]] = {
    "ffn1024, 2 a run": {"draft": "ffn1024", "drafted": 2},
    "n-gram, 4 a run": {"draft": "n-gram", "drafted": 4},
    "auto": {"draft": "auto"},
}
# What turning itself off may cost.
_LEAST_OF_AUTO = 0.95


def run() -> list[Row]:
    ids = [int(number) for number in np.random.default_rng(0).integers(3, 32_000, _PROMPT)]
    with load(llama_halves_bundle(), threads=CORES) as model:
        rounds = [_round(model, ids) for _ in range(_ROUNDS + 1)][1:]  # the first opens and warms everything
    rows = []
    for way in _WAYS:
        how = (
            f"{_ROUNDS} rounds in turn, {_NEW} greedy tokens, {CORES} threads, Llama shape of 100 M parameters, random "
            f"weights; last round: {_accepted(rounds[-1][way].drafts)}"
        )
        ratio = median(_rate(found[way]) / _rate(found[""]) for found in rounds)
        same = all(found[way].tokens == found[""].tokens for found in rounds)
        bar, reached = ("same text", same)
        if way == "auto":
            bar, reached = f"same text, >= {_LEAST_OF_AUTO}x", same and ratio >= _LEAST_OF_AUTO
        rows.append(Row(f"tokens per second drafted by {way}, over none", f"{ratio:.2f}x", bar, reached, how))
    return rows


def _round(model: ElasticModel, ids: list[int]) -> dict[str, GeneratedRow]:
    """One text in each way; without a draft it is called "" ."""
    found = {}
    for way, options in {"": {}, **_WAYS}.items():
        sleep(_PAUSE)
        found[way] = model.generate(ids, max_tokens=_NEW, stop=[], **options).rows[0]
    return found


def _rate(row: GeneratedRow) -> float:
    assert row.tokens_per_second is not None
    return row.tokens_per_second


def _accepted(drafts: tuple[DraftedTokens, ...]) -> str:
    each = [f"{one.accepted} of {one.drafted} tokens of {one.draft} in {one.runs} runs" for one in drafts]
    return ", ".join(each) or "nothing drafted"
