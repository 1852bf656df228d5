from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.errors import InputError
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.retrieval import Index, compare_submodels

Feeds = Callable[..., dict[str, Any]]
Edit = Callable[[Path, Callable[[dict[str, Any]], object]], None]


def test_figures_are_those_of_the_searches(model: ElasticModel, index: Index, feeds: Feeds) -> None:
    queries = feeds(12, 8, seed=5)
    events: list[tuple[str, int, int]] = []
    comparison = compare_submodels(index, model, queries, k=4, progress=lambda *event: events.append(event))
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
        comparison = compare_submodels(index, model, feeds(3, 8))
    assert [(each.flops, round(each.flops_saved, 9)) for each in comparison.submodels] == [(1000, 0), (600, 0.4)]


def test_accuracy_is_of_the_nearest_rows_label(model: ElasticModel, feeds: Feeds) -> None:
    labels = np.arange(30) % 3
    index = Index.build(model, feeds(30, 8), labels=labels)
    queries, wanted = feeds(9, 8, seed=5), np.zeros(9, np.int64)
    comparison = compare_submodels(index, model, queries, labels=wanted)
    for each in comparison.submodels:
        first = index.search(model, queries, k=1, submodel=each.submodel).ids[:, 0]
        assert each.accuracy == np.mean(labels[first] == 0)


@pytest.mark.parametrize("k", [0, -1, True])
def test_refuses_k(model: ElasticModel, index: Index, feeds: Feeds, k: Any) -> None:
    with pytest.raises(InputError, match="k: expected a whole number of at least 1"):
        compare_submodels(index, model, feeds(2, 8), k=k)


def test_labels_on_one_side_alone_are_refused(model: ElasticModel, index: Index, feeds: Feeds) -> None:
    with pytest.raises(InputError, match="labels: index has none; label the corpus and the queries, or neither"):
        compare_submodels(index, model, feeds(2, 8), labels=np.array([0, 1]))
    labelled = Index.build(model, feeds(3, 8), labels=np.array([0, 1, 2]))
    with pytest.raises(InputError, match="labels: the list of queries has none"):
        compare_submodels(labelled, model, feeds(2, 8))


def test_submodels_that_may_not_run_here_are_left_out(
    bundle: Path, index: Index, feeds: Feeds, edit_manifest: Edit
) -> None:
    def edit(data: dict[str, Any]) -> None:
        for engine in data["engines"]:
            if engine["submodel"] == "ffn16":
                engine["backend"] = "tensorrt"

    edit_manifest(bundle, edit)
    with nestforge.load(bundle, threads=1) as model:
        assert [each.submodel for each in compare_submodels(index, model, feeds(2, 8)).submodels] == ["ffn32"]
