"""Which engines may be open under a cap, from one call to the next."""

from __future__ import annotations

from pathlib import Path

import pytest
from nestforge.errors import SelectionError
from nestforge.runtime.engines.memory import engine_needs
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel

LARGEST = "no limit asked: the largest submodel"
MANY = 40  # rows of 256 tokens, which take more than one engine does


@pytest.fixture
def all_mb(llama_bundle: Path) -> float:
    """What all engines that generate take packed, and a cache of a few tokens."""
    with load(llama_bundle) as model:
        entry = model.bundle.manifest.generation
        assert entry is not None
        needs = engine_needs(model.bundle, entry.engines)
    return sum(need.weight_bytes + need.own_bytes for need in needs) / 1e6 + 0.1


def writers_in(model: ElasticModel, rows: int) -> list[str]:
    """The submodels that may write in a session of so many rows."""
    found = []
    with model.session(rows, capacity=256) as session:
        for submodel in ("ffn8", "ffn16", "ffn24", "ffn32"):
            try:
                model.generate([5], session=session, max_tokens=2, submodel=submodel)
            except SelectionError as refused:
                line = f"submodel {submodel}: the memory_mb of this model leaves no room for it; there is room for "
                if not str(refused).startswith(line):
                    raise
            else:
                found.append(submodel)
    return found


def test_a_cache_that_is_gone_leaves_room_for_more_engines(llama_bundle: Path, all_mb: float) -> None:
    """What may be open is not what the first call could open for good."""
    with load(llama_bundle, memory_mb=all_mb, threads=1) as model:
        tight = writers_in(model, MANY)
        assert 0 < len(tight) < 4
        assert writers_in(model, 1) == ["ffn8", "ffn16", "ffn24", "ffn32"]
        assert model.generate([5], max_tokens=3).rows[0].runs[0].reason == LARGEST


def test_open_engines_make_room_for_a_cache(llama_bundle: Path, all_mb: float) -> None:
    with load(llama_bundle, memory_mb=all_mb, threads=1) as model:
        first = model.generate([5], max_tokens=3).rows[0].tokens
        assert len(writers_in(model, 1)) == len(model.generate.open_submodels) == 4
        tight = writers_in(model, MANY)
        assert 0 < len(tight) < 4
        assert set(model.generate.open_submodels) == set(tight)
        assert model.generate([5], max_tokens=3).rows[0].tokens == first


def test_nothing_is_closed_while_it_generates(llama_bundle: Path, all_mb: float) -> None:
    with load(llama_bundle, memory_mb=all_mb, threads=1) as model:
        writers_in(model, 1)
        with model.generate.stream([5], max_tokens=20) as generation:
            next(generation)
            with pytest.raises(SelectionError, match=r"^memory_mb=\S+: a cache of \S+ MB, \S+ MB are left; ask for"):
                model.session(rows=MANY, capacity=256)
            assert len(list(generation)) == 19
        assert model.session(rows=MANY, capacity=256).rows == MANY
