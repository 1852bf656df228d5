import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import ParityReceipt
from nestforge.errors import InputError, OutputError
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.retrieval import index as index_file
from nestforge.runtime.retrieval import search as nearest_module
from nestforge.runtime.retrieval.compare import compare
from nestforge.runtime.retrieval.identity import BuiltBy, IndexIdentity
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
        compare(model, index, feeds(2, 8), progress=None)


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


def made(entries: tuple[str, ...] | None, labels: bool = False) -> Index:
    """An index of random rows that no bundle built."""
    count = len(entries) if entries is not None else 4
    rows = np.random.default_rng(count).standard_normal((count, 5))
    vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    identity = IndexIdentity(
        schema_version=1,
        model="m",
        weights_sha256="0" * 64,
        configuration=(),
        output="total",
        width=5,
        similarity="cosine",
        normalisation="l2",
        ties="lowest row",
        submodel="ffn4",
        engines=(BuiltBy(Bucket(1, 8), ParityReceipt("numpy", "exact", 0, 0, 1, (), (), "1" * 64, "0" * 64, 0.0)),),
        rows=count,
        entries="none" if entries is None else "texts",
        labelled=labels,
        tokenizer_sha256=None if entries is None else "2" * 64,
    )
    return Index(identity, vectors, entries, np.arange(count) if labels else None)


def assert_same(one: Index, other: Index) -> None:
    assert (one.identity, one.entries) == (other.identity, other.entries)
    assert one.embeddings.tobytes() == other.embeddings.tobytes()
    assert (one.labels is None) == (other.labels is None)
    assert one.labels is None or np.array_equal(one.labels, other.labels)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(entries=st.none() | st.lists(st.text(max_size=9), min_size=1, max_size=6).map(tuple), labels=st.booleans())
def test_what_is_saved_is_loaded(tmp_path: Path, entries: tuple[str, ...] | None, labels: bool) -> None:
    index = made(entries, labels)
    index.save(tmp_path / "i.index")
    assert_same(Index.load(tmp_path / "i.index"), index)
    first = (tmp_path / "i.index").read_bytes()
    index.save(tmp_path / "i.index")
    assert (tmp_path / "i.index").read_bytes() == first, "the same index is the same bytes"


def test_a_built_index_keeps_its_receipts(index: Index, tmp_path: Path) -> None:
    index.save(tmp_path / "i.index")
    loaded = Index.load(tmp_path / "i.index")
    assert_same(loaded, index)
    assert loaded.identity.engines[0].receipt.rule == "exact"
    assert loaded.name == f"index {tmp_path / 'i.index'}"


def test_no_byte_changes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "i.index"
    index = made(("one", "two", "three"), labels=True)
    index.save(path)
    whole = path.read_bytes()
    refusals = []
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        try:
            assert_same(Index.load(path), index)
        except InputError as failure:
            refusals.append(str(failure))
    assert len(refusals) > len(whole) / 6
    assert all(refusal.startswith(str(path)) and "\n" not in refusal for refusal in refusals)


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_a_cut_file_is_refused(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "i.index"
    made(("one", "two")).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept if kept > 1 else kept * len(whole))])
    with pytest.raises(InputError, match="expected an NPZ file"):
        Index.load(path)


def rewritten(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    with np.load(path) as archive:
        members = dict(archive)
    edit(members)
    with path.open("wb") as stream:
        np.savez(stream, **members)


def edit_identity(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def edit(members: dict[str, Any]) -> None:
        data = json.loads(members["identity"].tobytes()) | changes
        members["identity"] = np.frombuffer(json.dumps(data).encode(), np.uint8)

    return edit


def put(**arrays: Any) -> Callable[[dict[str, Any]], None]:
    return lambda members: members.update(arrays)


def raw(text: bytes) -> Any:
    return np.frombuffer(text, np.uint8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda members: members.pop("identity"), "not an index of `nestforge index`"),
        (put(identity=raw(b"{")), "identity: not JSON"),
        (put(identity=raw(b'{"rows": NaN}')), "identity: not JSON (NaN is not a JSON number)"),
        (put(identity=np.zeros(2**20 + 1, np.uint8)), "not an index of `nestforge index`"),
        (edit_identity(schema_version=3), "schema_version '3', expected 1"),
        (edit_identity(similarity="euclidean"), "identity: similarity: got 'euclidean'"),
        (edit_identity(normalisation="none"), "identity: normalisation: got 'none'"),
        (edit_identity(ties="random"), "identity: ties: got 'random'"),
        (edit_identity(rows=3), "embeddings: expected float32 [3, 5], got float32 [2, 5]"),
        (edit_identity(unknown=1), "identity: unknown key 'unknown'"),
        (edit_identity(engines=[]), "identity: engines: none; expected the engines that built the index"),
        (
            edit_identity(weights_sha256="\x1b[31m\n"),
            "identity: weights_sha256: '\\x1b[31m\\n'; expected 64 lower-case",
        ),
        (edit_identity(tokenizer_sha256=None), "identity: tokenizer_sha256: an index of 'texts' lacks one"),
        (edit_identity(entries="ids"), "identity: tokenizer_sha256: an index of 'ids' has one"),
        (put(embeddings=np.full((2, 5), 1e30, np.float32)), "embeddings: row 0 is not of length 1"),
        (
            put(embeddings=np.full((2, 5), 0x7F800001, np.uint32).view(np.float32)),
            "embeddings: row 0 is not of length 1",
        ),
        (put(embeddings=np.zeros((2, 5), np.float32)), "embeddings: row 0 is not of length 1"),
        (put(embeddings=np.full((2, 5), np.nan, np.float32)), "embeddings: row 0 is not of length 1"),
        (put(embeddings=np.eye(2, 5)), "embeddings: expected float32 [2, 5], got float64 [2, 5]"),
        (lambda members: members.pop("embeddings"), "embeddings: expected float32 [2, 5], got nothing"),
        (put(entry_ends=np.array([4, 3])), "entries: do not fit entry_ends"),
        (put(entry_ends=np.array([-1, 6])), "entries: do not fit entry_ends"),
        (put(entry_ends=np.array([2**62, 6])), "entries: do not fit entry_ends"),
        (put(entry_ends=np.array([2**63 - 1, -2])), "entries: do not fit entry_ends"),
        (put(entries=raw(b"\xff\xfe\xff\xff\xff\xff")), "entries: not UTF-8"),
        (put(labels=np.array([1, 2])), "unknown arrays labels; expected an index"),
        (edit_identity(labelled=True), "labels: expected int64 [2], got nothing"),
        (put(other=np.array([1])), "unknown arrays other; expected an index"),
        (put(embeddings=np.array([{}], dtype=object)), "expected an NPZ file of plain arrays"),
    ],
)
def test_refuses_what_no_release_wrote(tmp_path: Path, edit: Any, message: str) -> None:
    path = tmp_path / "i.index"
    made(("one", "two")).save(path)
    rewritten(path, edit)
    with pytest.raises(InputError) as error:
        Index.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_archive_that_unpacks_too_large_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.index"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("identity.npy", bytes(2**20))
    monkeypatch.setattr(index_file, "MAX_BYTES", 2**19)
    with pytest.raises(InputError, match="unpacks to 1048576 bytes, more than the 524288 allowed"):
        Index.load(path)
    with pytest.raises(InputError, match=r"make an index of .* bytes, more than 524288; split the corpus"):
        index_file.check_size(10**6, 5, None)


def test_saving_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "i.index"
    made(("before",)).save(path)
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OutputError, match="cannot be written \\(No space left on device\\); the index was not saved"):
        made(("after",)).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["i.index"]


def test_saving_says_what_it_cannot(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written \\(No such file or directory\\)"):
        made(("one",)).save(tmp_path / "none" / "i.index")
    with pytest.raises(InputError, match="half of a surrogate pair"):
        made(("\ud800",)).save(tmp_path / "i.index")
    with pytest.raises(InputError, match="cannot be read"):
        Index.load(tmp_path / "i.index")
