"""What places of a cache hold, by whom it was written, and how much of it another engine can read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.generation.calls.written import Ids, Written

GOLDEN = Path(__file__).parents[4] / "golden" / "bundle-fewer-heads"


@pytest.fixture(scope="module")
def engines() -> tuple[EngineEntry, EngineEntry]:
    """Of all heads, and of fewer."""
    generation = open_bundle(GOLDEN).manifest.generation
    assert generation is not None
    whole = next(engine for engine in generation.engines if engine.cache_heads is None)
    return whole, next(engine for engine in generation.engines if engine.cache_heads == (2, 2))


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int64)


def test_tokens_are_there_once_they_are_believed(engines: tuple[EngineEntry, EngineEntry]) -> None:
    written = Written(2, 8)
    written.put(0, 0, ids(5, 6), engines[0])
    assert written.at(0) == ()
    written.lengths[0] = 2
    written.extend([7, 9], engines[0])
    assert (written.at(0), written.at(1)) == ((5, 6, 7), (9,))
    written.forget()
    assert (written.at(0), written.at(1)) == ((), ())


def test_an_engine_reads_what_was_written_with_its_heads_or_more(engines: tuple[EngineEntry, EngineEntry]) -> None:
    whole, fewer = engines
    written = Written(1, 8)
    assert written.common(ids(1, 2), whole) == [0]
    written.put(0, 0, ids(1, 2), whole)
    written.put(0, 2, ids(3), fewer)
    written.lengths[0] = 3
    assert written.common(ids(1, 2, 3, 4), fewer) == [3]
    assert written.common(ids(1, 2, 3, 4), whole) == [2]
    assert written.common(ids(1, 7), whole) == [1]
    assert written.common(ids(1, 2, 3), fewer, own=True) == [0]
    assert written.common(ids(1, 2, 3), whole, own=True) == [2]
    other = replace(whole, id="another")
    assert (written.common(ids(1, 2), other), written.common(ids(1, 2), other, own=True)) == ([2], [0])


def test_places_are_copied_and_exchanged(engines: tuple[EngineEntry, EngineEntry]) -> None:
    whole, fewer = engines
    written = Written(2, 4)
    written.put(0, 0, ids(1, 2, 3), fewer)
    written.copy(0, 1, 2)
    written.lengths[1] = 2
    assert written.at(1) == (1, 2)
    assert written.common(ids(1, 2), whole) == [0, 0]
    written.put(0, 0, ids(8), whole)
    written.swap(0, 1)
    written.lengths[0], written.lengths[1] = 2, 1
    assert (written.at(0), written.at(1)) == ((1, 2), (8,))
    assert written.common(ids(8), whole) == [0, 1]
