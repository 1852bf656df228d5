from collections.abc import Callable
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import InputError
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.retrieval import search as nearest_module
from nestforge.runtime.retrieval.compare import compare
from nestforge.runtime.retrieval.index import Index
from nestforge.runtime.retrieval.search import nearest, unit
from numpy.typing import NDArray

Feeds = Callable[..., dict[str, Any]]
Edit = Callable[[Path, Callable[[dict[str, Any]], object]], None]


def test_figures_are_those_of_the_searches(model: ElasticModel, index: Index, feeds: Feeds) -> None:
    queries = feeds(12, 8, seed=5)
    events: list[tuple[str, int, int]] = []
    comparison = compare(model, index, queries, k=4, progress=lambda *event: events.append(event))
    assert (comparison.k, comparison.queries, comparison.truncated) == (4, 12, 0)
    universal, small = comparison.submodels
    assert (universal.submodel, universal.labels) == ("ffn32", ("XL",))
    assert (universal.recall_at_k, universal.nearest_agreement, universal.parameters_saved) == (1, 1, 0)
    whole, part = (index.search(model, queries, k=4, submodel=name).ids for name in ("ffn32", "ffn16"))
    assert small.recall_at_k == np.mean([len(set(a) & set(b)) / 4 for a, b in zip(whole, part, strict=True)])
    assert small.nearest_agreement == np.mean(whole[:, 0] == part[:, 0])
    assert small.nearest_agreement < 1, "the example tells them apart"
    parameters = {entry.id: entry.parameters for entry in model.bundle.manifest.submodels}
    assert small.parameters_saved == 1 - parameters["ffn16"] / parameters["ffn32"]
    assert (small.flops, small.accuracy) == (1000, None)
    assert small.ms_per_query > 0
    assert events == [("submodels", done, 2) for done in range(3)]


def test_flops_saved_are_of_the_engines_that_ran(bundle: Path, index: Index, feeds: Feeds, edit_manifest: Edit) -> None:
    def edit(data: dict[str, Any]) -> None:
        for engine in data["engines"]:
            engine["flops"] = (600 if engine["submodel"] == "ffn16" else 1000) * engine["bucket"]["batch"]

    edit_manifest(bundle, edit)
    with nestforge.load(bundle, threads=1) as model:
        comparison = compare(model, index, feeds(3, 8))
    assert [(each.flops, round(each.flops_saved, 9)) for each in comparison.submodels] == [(1000, 0), (600, 0.4)]


def test_accuracy_is_of_the_nearest_rows_label(model: ElasticModel, feeds: Feeds) -> None:
    labels = np.arange(30) % 3
    index = Index.build(model, feeds(30, 8), labels=labels)
    queries, wanted = feeds(9, 8, seed=5), np.zeros(9, np.int64)
    comparison = compare(model, index, queries, labels=wanted)
    for each in comparison.submodels:
        first = index.search(model, queries, k=1, submodel=each.submodel).ids[:, 0]
        assert each.accuracy == np.mean(labels[first] == 0)


def test_progress_is_a_function(model: ElasticModel, index: Index, feeds: Feeds) -> None:
    with pytest.raises(InputError, match="progress: expected a function, got None"):
        compare(model, index, feeds(2, 8), progress=None)  # type: ignore[arg-type]


def test_labels_on_one_side_alone_are_refused(model: ElasticModel, index: Index, feeds: Feeds) -> None:
    with pytest.raises(InputError, match="labels: index has none; label the corpus and the queries, or neither"):
        compare(model, index, feeds(2, 8), labels=np.array([0, 1]))
    labelled = Index.build(model, feeds(3, 8), labels=np.array([0, 1, 2]))
    with pytest.raises(InputError, match="labels: the list of queries has none"):
        compare(model, labelled, feeds(2, 8))


def test_submodels_that_may_not_run_here_are_left_out(
    bundle: Path, index: Index, feeds: Feeds, edit_manifest: Edit
) -> None:
    def edit(data: dict[str, Any]) -> None:
        for engine in data["engines"]:
            if engine["submodel"] == "ffn16":
                engine["backend"] = "tensorrt"

    edit_manifest(bundle, edit)
    with nestforge.load(bundle, threads=1) as model:
        assert [each.submodel for each in compare(model, index, feeds(2, 8)).submodels] == ["ffn32"]


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
