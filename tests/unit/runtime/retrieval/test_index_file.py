import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import ParityReceipt
from nestforge.errors import InputError, OutputError
from nestforge.runtime.retrieval import index as index_file
from nestforge.runtime.retrieval.identity import BuiltBy, IndexIdentity
from nestforge.runtime.retrieval.index import Index


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
