from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.runtime.retrieval import nearest as nearest_module
from nestforge.runtime.retrieval.nearest import nearest, unit
from numpy.typing import NDArray

# Few different vectors: many rows are equal, and many scores tie.
COORDINATES = st.integers(-2, 2)


def brute(corpus: NDArray[np.float32], query: NDArray[np.float32], k: int) -> list[int]:
    """Every row scored in float64, sorted by score and then by number."""
    scores = [float((row.astype(np.float64) * query.astype(np.float64)).sum()) for row in corpus]
    return sorted(range(len(corpus)), key=lambda row: (-scores[row], row))[:k]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    width = draw(st.integers(1, 5))
    vector = st.lists(COORDINATES, min_size=width, max_size=width).filter(any)
    made = [np.array(draw(st.lists(vector, min_size=1, max_size=most)), np.float32) for most in (12, 3)]
    return unit(made[0]), unit(made[1])


@given(data=corpora(), k=st.integers(1, 15))
def test_search_equals_brute_force_ties_included(data: tuple[NDArray[np.float32], NDArray[np.float32]], k: int) -> None:
    corpus, queries = data
    ids, scores = nearest(corpus, queries, k)
    assert ids.tolist() == [brute(corpus, query, k) for query in queries]
    assert (ids.dtype, scores.dtype, ids.shape) == (np.int64, np.float32, (len(queries), min(k, len(corpus))))
    np.testing.assert_allclose(scores, np.take_along_axis(queries @ corpus.T, ids, axis=1), atol=1e-6)


@given(data=corpora(), seed=st.integers(0, 99))
def test_the_order_of_the_corpus_does_not_matter(
    data: tuple[NDArray[np.float32], NDArray[np.float32]], seed: int
) -> None:
    corpus, queries = data
    order = np.random.default_rng(seed).permutation(len(corpus))
    _, scores = nearest(corpus, queries, 4)
    shuffled, again = nearest(corpus[order], queries, 4)
    assert again.tobytes() == scores.tobytes()
    distinct = len(np.unique(corpus, axis=0)) == len(corpus) and all(len(set(row)) == len(row) for row in scores)
    if distinct and len(corpus) <= 4:
        assert np.array_equal(order[shuffled], nearest(corpus, queries, 4)[0])


def test_equal_rows_tie_wherever_they_lie() -> None:
    rng = np.random.default_rng(0)
    base = unit(rng.standard_normal((40, 33)).astype(np.float32))
    corpus = np.concatenate([base, base, base])  # matrix products round the edges of a block differently
    ids, _ = nearest(corpus, base[:5] + np.float32(1e-3), 6)
    assert [row[:3] for row in ids.tolist()] == [[i, i + 40, i + 80] for i in range(5)]


def test_a_large_search_goes_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    corpus, queries = (unit(rng.standard_normal((n, 16)).astype(np.float32)) for n in (300, 20))
    whole = nearest(corpus, queries, 7)
    monkeypatch.setattr(nearest_module, "_SCORES_AT_ONCE", 700)
    monkeypatch.setattr(nearest_module, "_VALUES_AT_ONCE", 40)
    for mine, theirs in zip(nearest(corpus, queries, 7), whole, strict=True):
        assert np.array_equal(mine, theirs)


def test_unit_rows_have_length_one_or_no_direction() -> None:
    rows = unit(np.array([[3, 4], [0, 0], [np.inf, 1], [1e30, 0]], np.float32))
    np.testing.assert_array_equal(rows, np.array([[0.6, 0.8], [np.nan] * 2, [np.nan] * 2, [1, 0]], np.float32))
