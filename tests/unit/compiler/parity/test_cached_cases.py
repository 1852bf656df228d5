"""Texts of the gate, and the pieces in which engines get them."""

from __future__ import annotations

import numpy as np
import pytest
from nestforge.bundle.entries.generation_entry import CachedLayer, GenerationEntry
from nestforge.compiler.parity import cases
from nestforge.compiler.parity.cached_cases import (
    cached_batches,
    cases_of,
    judged_specs,
    unproven_window,
)
from nestforge.compiler.parity.cases import judged_places, unjudged
from nestforge.exporters.parts import MOST_NEW_TOKENS


def entry(positions: int, window: int | None = None, vocabulary: int = 50) -> GenerationEntry:
    layers = (CachedLayer(2, 8), CachedLayer(2, 8, window))
    return GenerationEntry(vocabulary, layers, positions, (), ())


def test_texts_are_given_whole_in_pieces_token_by_token_and_in_rows() -> None:
    batches = cached_batches(entry(4096), long=True)
    assert [len(batch) for batch in batches] == [1, 1, 1, 3, 1]
    whole, pieces, steps, rows, longest = batches
    assert whole[0].pieces == (48,)
    assert sum(pieces[0].pieces) == 48
    assert len(set(pieces[0].pieces)) > 3
    assert max(pieces[0].pieces) <= 8
    assert steps[0].pieces == (16, *[1] * 32)
    assert [row.pieces for row in rows] == [(36, *[1] * 12), (9, *[1] * 12), (1, *[1] * 12)]
    assert longest[0].pieces[0] > MOST_NEW_TOKENS, "more than one run"
    assert len(cached_batches(entry(4096), long=False)) == 4


@pytest.mark.parametrize(
    ("made", "longest", "name", "unproven"),
    [
        (entry(4096), 521, "longer than a run", None),
        (entry(4096, window=3), 521, "longer than a run", None),
        (entry(4096, window=512), 536, "longer than the window", None),
        (entry(4096, window=1024), 1048, "longer than the window", None),
        (entry(4096, window=4095), 521, "longer than a run", "no text was longer than its window of 4095 tokens"),
        (
            entry(4096, window=1024, vocabulary=300_000),
            521,
            "longer than a run",
            "no text was longer than its window of 1024 tokens",
        ),
        (entry(100, window=60), 84, "longer than the window", None),
        (entry(100, window=90), 95, "longer than the window", None),
        (entry(100, window=97), 48, "whole", "no text was longer than its window of 97 tokens"),
        (entry(100), 48, "whole", None),
    ],
)
def test_a_text_is_longer_than_the_window_where_that_is_affordable(
    made: GenerationEntry, longest: int, name: str, unproven: str | None
) -> None:
    batches = cached_batches(made, long=True)
    case = max(cases_of(batches), key=lambda case: case.feeds["input_ids"].shape[1])
    assert (case.name, case.feeds["input_ids"].shape[1]) == (name, longest)
    assert unproven_window(made, batches) == unproven


@pytest.mark.parametrize("positions", [2, 3, 7, 40, 60, 600])
def test_no_text_is_longer_than_the_model_takes(positions: int) -> None:
    batches = cached_batches(entry(positions), long=True)
    for batch in batches:
        for row in batch:
            assert sum(row.pieces) == len(row.ids) <= positions
            assert min(row.pieces) >= 1
            assert set(row.ids) <= set(range(50))
    names = [case.name for case in cases_of(batches)]
    assert len(names) == len(set(names))


def test_of_a_long_text_and_many_words_some_logits_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """All where they are not too many; else half are the last ones, where a run ends and steps are taken."""
    assert judged_places(521, 8_000) == range(521)
    few = judged_places(521, 65_536)
    assert (len(few), few[0], few[-32:]) == (64, 0, [*range(489, 521)])
    assert list(few) == sorted(set(few))
    assert max(np.diff(few)) <= 16
    assert len(judged_places(521, 2**20)) == 16
    batches = cached_batches(entry(60), long=True)
    longest = max(len(row.ids) for batch in batches for row in batch)
    assert unjudged(cases_of(batches), judged_specs(entry(60))) is None
    monkeypatch.setattr(cases, "MOST_JUDGED", 1)
    note = f"logits of 16 of {longest} positions where fewest are judged"
    assert unjudged(cases_of(batches), judged_specs(entry(60))) == note


def test_they_are_always_the_same() -> None:
    first, second = (cases_of(cached_batches(entry(100), long=False)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.feeds["input_ids"], other.feeds["input_ids"])
