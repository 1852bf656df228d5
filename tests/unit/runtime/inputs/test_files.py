import contextlib
import hashlib
import os
import random
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.errors import CheckpointError, InputError
from nestforge.runtime.inputs.files import checked_labels, read_array_file, read_npz, read_text_file

INPUTS = (TensorSpec("x", "float32", ("batch", 2)), TensorSpec("ids", "int64", ("batch", "sequence"), high=9))


def write(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_rows_and_labels_are_read(tmp_path: Path) -> None:
    x, ids, labels = np.ones((3, 2), np.float32), np.arange(6).reshape(3, 2), np.array([1, 0, 1])
    path = write(tmp_path / "r.npz", x=x, ids=ids, labels=labels)
    file = read_array_file(path, INPUTS)
    assert (file.rows, sorted(file.feeds)) == (3, ["ids", "x"])
    assert file.labels.tolist() == [1, 0, 1]
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_array_file(write(tmp_path / "s.npz", x=x, ids=ids), INPUTS).labels is None


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"x": np.ones((3, 2), np.float32)}, "inputs x: expected exactly ids, x"),
        (
            {"x": np.ones((3, 2)), "ids": np.zeros((3, 1), int)},
            "input x: expected a numpy array of float32, got float64",
        ),
        ({"x": np.ones((2, 2), np.float32), "ids": np.zeros((3, 1), int)}, "batch is 2 in another input"),
        ({"x": np.ones((3, 2), np.float32), "ids": np.full((3, 1), 9)}, r"values 9\.\.9, expected 0\.\.8"),
        ({"x": np.ones((0, 2), np.float32), "ids": np.zeros((0, 1), int)}, "has no rows"),
        ({"x": np.ones((6, 2), np.float32), "ids": np.zeros((6, 1), int)}, "6 rows, more than the 5 allowed"),
        ({"x": np.array([{}], object), "ids": np.zeros((1, 1), int)}, "expected an NPZ file of plain arrays"),
    ],
)
def test_what_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray], problem: str) -> None:
    path = write(tmp_path / "r.npz", **arrays)
    with pytest.raises(InputError, match=problem) as refusal:
        read_array_file(path, INPUTS, max_rows=5)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


def test_sizes_are_bounded_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, x=np.zeros((1000, 2), np.float32), ids=np.zeros((1000, 1), int))
    with pytest.raises(InputError, match="unpacks to"):
        read_array_file(path, INPUTS, max_bytes=4000)
    with pytest.raises(InputError, match="bytes, more than the 10 allowed"):
        read_array_file(path, INPUTS, max_bytes=10)
    with pytest.raises(InputError, match="cannot be read"):
        read_array_file(tmp_path / "none.npz", INPUTS)


def test_labels_are_classes_one_a_row() -> None:
    path = Path("r.npz")
    found = checked_labels(path, np.array([2, 0], np.uint8), 2, 3)
    assert (found.tolist(), found.dtype) == ([2, 0], np.int64)
    with pytest.raises(InputError, match=r"^r.npz: labels: row 1 has 3, expected 0\.\.2"):
        checked_labels(path, np.array([0, 3]), 2, 3)
    with pytest.raises(InputError, match="row 0 has -1"):
        checked_labels(path, np.array([-1, 0]), 2, 3)
    for labels in (np.array([0.0, 1.0]), np.array([0]), np.array([[0], [1]]), np.array([True, False])):
        with pytest.raises(InputError, match="expected 2 whole numbers"):
            checked_labels(path, labels, 2, 3)


ROWS = {"a": np.arange(600).reshape(3, 200), "b": np.ones(3, np.float32)}


def refused(path: Path) -> str:
    with pytest.raises(InputError) as error:
        read_npz(path, 2**20)
    message = str(error.value)
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


NO_NPZ = "expected an NPZ file of plain arrays, as numpy.savez writes it"


@pytest.fixture(params=[np.savez, np.savez_compressed])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(tmp_path / "a.npz", **ROWS)
    return tmp_path / "a.npz"


def test_arrays_by_name(path: Path) -> None:
    found = read_npz(path, 10_000)
    assert found.keys() == ROWS.keys()
    assert all(np.array_equal(found[name], ROWS[name]) for name in ROWS)


def test_damage_of_any_kind(path: Path) -> None:
    """Decompressors, zipfile and numpy each have errors of their own."""
    raw, rng = path.read_bytes(), random.Random(0)
    for _ in range(200):
        damaged = bytearray(raw)
        for place in rng.sample(range(len(raw)), 3):
            damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(InputError):  # some bits matter to nobody
            read_npz(path, 2**20)


def test_a_file_that_was_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])
    assert refused(path) == NO_NPZ


def test_other_files_among_the_arrays(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", "hello")
    assert refused(path) == NO_NPZ


@pytest.mark.parametrize("raw", [b"", b"PK", b"PK\x03\x04cut", b"not an archive", bytes(100)])
def test_no_npz_at_all(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(raw)
    assert refused(tmp_path / "a.npz") == NO_NPZ


@pytest.mark.parametrize("kind", ["device", "pipe", "long", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A device has no end, and a pipe may have no writer."""
    path = {"device": Path("/dev/full"), "long": tmp_path / ("x" * 5000)}.get(kind, tmp_path / "it")
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    with pytest.raises(InputError, match=r"a pipe or a device$|cannot be read \(File name too long\)"):
        read_npz(path, 10)


def test_what_a_file_holds(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes("a\r\n\u00fc\n".encode())
    assert read_text_file(tmp_path / "t") == "a\r\n\u00fc\n"


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "folder"])
def test_what_has_no_end_is_refused_and_not_waited_for(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=f"{path}: expected a file, not a folder, a pipe or a device"):
        read_text_file(tmp_path / path, CheckpointError)


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestforge.runtime.inputs.files.MAX_TEXT_BYTES", 2)
    (tmp_path / "t").write_text("abc")
    with pytest.raises(InputError, match="t: more than the 2 bytes allowed; split it"):
        read_text_file(tmp_path / "t")
    (tmp_path / "t").write_text("ab")
    assert read_text_file(tmp_path / "t") == "ab"


def test_what_is_missing_or_not_utf_8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none: cannot be read \(No such file or directory\)"):
        read_text_file(tmp_path / "none")
    (tmp_path / "t").write_bytes(b"a\nb\n\xff\n")
    with pytest.raises(InputError, match="t: line 3: not UTF-8; expected a UTF-8 text file with one text per line"):
        read_text_file(tmp_path / "t")


def test_a_file_takes_memory_for_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a\n")
    tracemalloc.start()
    try:
        read_text_file(tmp_path / "t")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
