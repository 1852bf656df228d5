import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.retrieval import index as index_module
from nestforge.runtime.retrieval.compare import compare
from nestforge.runtime.retrieval.index import Index

Feeds = Callable[..., dict[str, Any]]
Reference = Callable[..., dict[str, Any]]
Edit = Callable[[Path, Callable[[dict[str, Any]], object]], None]

WORDS = ["a", "nest", "of", "models"]
TEXTS = [" ".join(WORDS[(i * step) % 4] for step in range(1, 2 + i % 9)) for i in range(24)]


def directions(outputs: dict[str, Any]) -> Any:
    return outputs["total"] / np.linalg.norm(outputs["total"], axis=1, keepdims=True)


def test_rows_are_the_universal_models_embeddings(
    model: ElasticModel, index: Index, feeds: Feeds, expected: Reference
) -> None:
    inputs = feeds(30, 8)
    np.testing.assert_allclose(
        index.embeddings, directions(expected(32, inputs["input_ids"], inputs["attention_mask"])), atol=1e-5
    )
    identity = index.identity
    assert (identity.submodel, identity.output, identity.width, identity.rows) == ("ffn32", "total", 16, 30)
    assert (identity.similarity, identity.normalisation, identity.ties) == ("cosine", "l2", "lowest row")
    assert (identity.entries, identity.tokenizer_sha256) == ("ids", None)
    assert [built.bucket for built in identity.engines] == [Bucket(1, 8)]
    assert repr(index) == "Index('index': 30 rows x 16 by ffn32 of tiny)"


def test_an_index_has_its_dimensions_and_queries_are_cut_to_them(
    bundle: Path, model: ElasticModel, index: Index, feeds: Feeds, tmp_path: Path, edit_manifest: Edit
) -> None:
    Index.build(model, feeds(30, 8), dimensions=6).save(tmp_path / "short.index")
    short = Index.load(tmp_path / "short.index")
    cut = index.embeddings[:, :6] / np.linalg.norm(index.embeddings[:, :6], axis=1, keepdims=True)
    np.testing.assert_allclose(short.embeddings, cut, atol=1e-6)
    assert short.identity.width == 6
    found = short.search(model, feeds(5, 8), k=1, dimensions=6)
    assert found.ids[:, 0].tolist() == list(range(5))
    np.testing.assert_allclose(found.scores, 1, atol=1e-6)
    assert compare(model, short, feeds(5, 8), k=1).submodels[0].nearest_agreement == 1
    with pytest.raises(InputError, match=r"index \S+ has 6, to which queries are cut, requested 8; build an i"):
        short.search(model, feeds(5, 8), dimensions=8)

    total = lambda data: next(spec for spec in data["outputs"] if spec["name"] == "total")  # noqa: E731
    edit_manifest(bundle, lambda data: total(data).update(dimensions=[16, 8]))
    with nestforge.load(bundle, threads=1) as listing:
        with pytest.raises(InputError, match=r"holds output 'total' \[batch, 6\].* total \['batch', 16\] cut to 16, 8"):
            short.search(listing, feeds(5, 8))
        with pytest.raises(InputError, match="dimensions: expected one of 16, 8, got 6, which the model lists"):
            Index.build(listing, feeds(3, 8), dimensions=6)
        assert Index.build(listing, feeds(3, 8), dimensions=8).identity.width == 8


@pytest.mark.parametrize("submodel", ["ffn16", "ffn32", "S", None])
def test_any_submodel_answers_and_says_so(
    model: ElasticModel, index: Index, feeds: Feeds, expected: Reference, submodel: str | None
) -> None:
    queries = feeds(5, 8, seed=9)
    found = index.search(model, queries, k=3, submodel=submodel)
    width = 16 if submodel in ("ffn16", "S") else 32
    vectors = directions(expected(width, queries["input_ids"], queries["attention_mask"]))
    scores = vectors @ index.embeddings.T
    assert found.ids.tolist() == np.argsort(-scores, axis=1)[:, :3].tolist()
    np.testing.assert_allclose(found.scores, np.sort(scores, axis=1)[:, ::-1][:, :3], atol=1e-5)
    assert found.entries == tuple(tuple(f"row {i}" for i in row) for row in found.ids.tolist())
    assert (found.submodel, found.engines) == (f"ffn{width}", (f"ffn{width}@b1-s8",))
    assert found.reason == (f"submodel {submodel} requested" if submodel else "no limit given: the largest submodel")


def test_limits_choose_for_one_query(bundle: Path, model: ElasticModel, index: Index, feeds: Feeds) -> None:
    with nestforge.load(bundle, threads=1) as fresh:
        assert index.search(fresh, feeds(4, 8), latency_ms=1).reason.startswith("measured here 0.4 ms <= 1 ms")
    assert index.search(model, feeds(4, 8), budget="edge").submodel == "ffn16"
    with pytest.raises(SelectionError, match="`deadline_ms` is for one query, got 4; ask with `latency_ms` instead"):
        index.search(model, feeds(4, 8), deadline_ms=50)
    with pytest.raises(SelectionError, match=r"`latency_ms` <= 1e-05; there is ffn32"):
        index.search(model, feeds(1, 8), latency_ms=1e-5)


def test_a_deadline_is_met_by_the_request_that_encodes(
    bundle: Path, model: ElasticModel, index: Index, feeds: Feeds, edit_manifest: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = model._in_flight.admit
    admitted: list[str] = []

    def admit(*asked: Any) -> Any:
        choice = choose(*asked)
        admitted.append(choice.engine.id)
        return choice

    monkeypatch.setattr(model._in_flight, "admit", admit)
    found = index.search(model, feeds(1, 8), k=3, deadline_ms=1e6)
    assert found.reason.startswith("measured here 2.5 ms, seen while running: "), "the model has built the index"
    assert " ms <= 1e+06 ms left of 1e+06, nothing in flight" in found.reason
    assert (list(found.engines), found.submodel) == (admitted, "ffn32")
    assert found.ids.tolist() == index.search(model, feeds(1, 8), k=3).ids.tolist()
    with pytest.raises(SelectionError, match=r"request with submodel, deadline_ms: expected a budget"):
        index.search(model, feeds(1, 8), deadline_ms=9, submodel="S")
    edit_manifest(bundle, uncover("ffn16@b1-s8", "graph_sha256", "f" * 64))
    with nestforge.load(bundle, threads=1) as other:
        index.search(other, feeds(1, 8), deadline_ms=1e6)
        with pytest.raises(SelectionError, match="engine ffn16@b1-s8 has a parity receipt for another file"):
            index.search(other, feeds(1, 8), deadline_ms=1e6, memory_mb=0.008)


def test_texts_go_by_length_to_buckets_and_are_kept(model: ElasticModel) -> None:
    index = Index.build(model, TEXTS)
    assert (index.entries, index.identity.entries) == (tuple(TEXTS), "texts")
    assert [built.bucket for built in index.identity.engines] == [Bucket(1, 8), Bucket(2, 16)]
    assert index.identity.tokenizer_sha256
    found = index.search(model, TEXTS[7], k=1)
    assert (found.entries, found.ids.tolist()) == (((TEXTS[7],),), [[7]])
    by_arrays = index.search(model, {"input_ids": np.array([[1, 5, 2]]), "attention_mask": np.ones((1, 3), np.int64)})
    assert by_arrays.ids.tolist() == index.search(model, ["nest"]).ids.tolist()


def test_long_texts_are_refused_or_cut(model: ElasticModel) -> None:
    corpus = ["a nest", "a nest " * 10]
    with pytest.raises(InputError, match="row 1: 22 steps, the largest bucket takes 16"):
        Index.build(model, corpus)
    index = Index.build(model, corpus, truncate=True)
    assert index.identity.truncated == 1
    with pytest.raises(InputError, match="input of 1 rows x 22 is larger than every bucket"):
        index.search(model, corpus[1])
    found = index.search(model, corpus[1], k=1, truncate=True)
    assert (found.truncated, found.ids.tolist()) == (1, [[1]])


def test_texts_are_cut_to_what_their_submodel_takes_here(bundle: Path) -> None:
    with nestforge.load(bundle, threads=1, memory_mb=0.03) as model:  # leaves out ffn32@b2-s16
        assert (model.longest_sequence(1), model.longest_sequence(1, "XL")) == (16, 8)
        index = Index.build(model, ["a nest", "a nest " * 10], truncate=True)
        assert (index.identity.truncated, [built.bucket for built in index.identity.engines]) == (1, [Bucket(1, 8)])
        found = index.search(model, "a nest " * 10, k=1, truncate=True, submodel="XL")
        assert (found.truncated, found.ids.tolist()) == (1, [[1]])


def test_progress_counts_rows(model: ElasticModel, feeds: Feeds) -> None:
    events: list[tuple[str, int, int]] = []
    Index.build(model, feeds(3, 9), progress=lambda *event: events.append(event))
    assert events == [("encode", 2, 3), ("encode", 3, 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": ["a"]}, "ids: expected 3 texts, one a row, got 1: ('a',)"),
        ({"ids": [1, 2, 3]}, "ids: expected a list of str or None, got list [1, 2, 3]"),
        ({"progress": None}, "progress: expected a function, got None"),
        (
            {"embedding": "hidden"},
            "output 'hidden' is no embedding; expected a float output [batch, width]",
        ),
        (
            {"embedding": "x"},
            "output 'x' is no embedding; expected a float output [batch, width], the model has total",
        ),
        ({"labels": np.array([1, 2])}, "labels: expected 3 whole numbers, got int64 of shape [2]"),
        ({"labels": np.array([1.0, 2, 3])}, "labels: expected 3 whole numbers, got float64 of shape [3]"),
    ],
)
def test_refuses_to_build(model: ElasticModel, feeds: Feeds, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Index.build(model, feeds(3, 8), **options)
    assert str(error.value).startswith(message)


def test_half_characters_are_refused_before_anything_is_encoded(
    model: ElasticModel, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="text 1: half of a surrogate pair"):
        Index.build(model, ["a nest", "\ud800"])
    monkeypatch.setattr(index_module, "encode", None)
    with pytest.raises(InputError, match=r"text '.ud800': half of a surrogate pair"):
        Index.build(model, feeds(2, 8), ids=["a", "\ud800"])


def test_a_row_without_direction_stops_at_once(model: ElasticModel, feeds: Feeds) -> None:
    inputs = feeds(6, 9)
    inputs["attention_mask"][1] = 0
    events: list[tuple[str, int, int]] = []
    with pytest.raises(InputError, match="row 1: output total is zero or not finite"):
        Index.build(model, inputs, progress=lambda *event: events.append(event))
    assert events == []


def test_ids_are_for_arrays(model: ElasticModel) -> None:
    with pytest.raises(InputError, match="ids: texts are kept as they are"):
        Index.build(model, ["a"], ids=["b"])


@pytest.mark.parametrize("k", [0, -1, True, 2.0])
def test_refuses_k(model: ElasticModel, index: Index, feeds: Feeds, k: Any) -> None:
    for ask in (partial(index.search, model), partial(compare, model, index)):
        with pytest.raises(InputError, match=r"k: expected (a whole number, 1 or above|int), got"):
            ask(feeds(2, 8), k=k)


def set_output(data: dict[str, Any]) -> None:
    data["outputs"][1]["name"] = "other"
    data["text"]["embedding"] = "other"


def drop_small_bucket(data: dict[str, Any]) -> None:
    data["engines"] = [e for e in data["engines"] if (e["submodel"], e["bucket"]["batch"]) != ("ffn32", 1)]


def another_pooling(data: dict[str, Any]) -> None:
    data["provenance"]["source"] = [{"path": "1_Pooling/config.json", "bytes": 3, "sha256": "e" * 64}]


def uncover(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(data: dict[str, Any]) -> None:
        next(engine for engine in data["engines"] if engine["id"] == name)["parity"][key] = value

    return edit


def another_store(data: dict[str, Any]) -> None:
    for entry in data["files"]:
        if entry["path"] == "weights.safetensors":
            entry["sha256"] = "f" * 64


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (another_store, InputError, "index: built by another universal model ('tiny', weights "),
        (another_pooling, InputError, "its weights are the same, its '1_Pooling/config.json' is not; build the index"),
        (set_output, InputError, "index: holds output 'total' [batch, 16], bundle "),
        (drop_small_bucket, InputError, "index: built by engine 'ffn32' at b1-s8, which bundle "),
        (uncover("ffn32@b1-s8", "weights_sha256", "f" * 64), SelectionError, "has a parity receipt for other weights"),
        (uncover("ffn32@b1-s8", "graph_sha256", "f" * 64), SelectionError, "has a parity receipt for another file"),
        (
            uncover("ffn32@b1-s8", "outputs", []),
            SelectionError,
            "engine ffn32@b1-s8 has a parity receipt that does not cover output 'total'",
        ),
        (uncover("ffn16@b2-s16", "graph_sha256", "f" * 64), SelectionError, "engine ffn16@b2-s16 has a parity receipt"),
    ],
    ids=[
        "universal",
        "configuration",
        "output",
        "building engine",
        "weights",
        "graph",
        "output of receipt",
        "query engine",
    ],
)
def test_a_bundle_that_may_not_answer(
    bundle: Path, index: Index, feeds: Feeds, edit_manifest: Edit, edit: Any, error: type[Exception], message: str
) -> None:
    edit_manifest(bundle, edit)
    with nestforge.load(bundle, threads=1) as other, pytest.raises(error) as caught:
        index.search(other, feeds(1, 8), submodel="ffn16")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_texts_of_another_tokenizer_are_refused(bundle: Path, model: ElasticModel, edit_manifest: Edit) -> None:
    index = Index.build(model, TEXTS)
    path = bundle / "tokenizer.json"
    path.write_text(path.read_text().replace('"nest":', '"NEST":'))

    def edit(data: dict[str, Any]) -> None:
        for entry in data["files"]:
            if entry["path"] == "tokenizer.json":
                entry["sha256"] = "e" * 64

    edit_manifest(bundle, edit)
    with nestforge.load(bundle, threads=1) as other, pytest.raises(InputError, match="went through another tokenizer"):
        index.search(other, "a nest")


def test_the_same_weights_in_another_bundle_answer(
    bundle: Path, index: Index, feeds: Feeds, tmp_path: Path, edit_manifest: Edit
) -> None:
    again = Path(shutil.copytree(bundle, tmp_path / "again.bundle"))
    edit_manifest(again, lambda data: data.update(name="again", notes=["compiled with other budgets"]))
    with nestforge.load(again, threads=1) as other:
        assert index.search(other, feeds(2, 8), k=1, submodel="S").submodel == "ffn16"


def test_only_the_universal_builds(bundle: Path, edit_manifest: Edit, feeds: Feeds) -> None:
    def drop(data: dict[str, Any]) -> None:
        data["submodels"] = [entry for entry in data["submodels"] if entry["id"] != "ffn32"]
        data["engines"] = [engine for engine in data["engines"] if engine["submodel"] != "ffn32"]

    edit_manifest(bundle, drop)
    with nestforge.load(bundle, threads=1) as other, pytest.raises(SelectionError) as error:
        Index.build(other, feeds(1, 8))
    assert str(error.value) == (
        "bundle of tiny: an index is built by the universal model, and it has only ffn16; compile "
        "with `include='levels'`"
    )


def test_a_submodel_left_out_by_memory_does_not_answer(bundle: Path, index: Index, feeds: Feeds) -> None:
    with nestforge.load(bundle, threads=1, memory_mb=0.03) as other:
        assert index.search(other, feeds(1, 8)).submodel == "ffn32"
        with pytest.raises(SelectionError, match="no engine for 1x16 here"):
            index.search(other, feeds(1, 16), submodel="ffn32")
