from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from nestforge.bundle.entries.tensor_spec import TensorSpec
from nestforge.errors import InputError
from nestforge.runtime.inputs.array_file import checked_labels, read_array_file

INPUTS = (TensorSpec("x", "float32", ("batch", 2)), TensorSpec("ids", "int64", ("batch", "sequence"), high=9))


def write(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_rows_and_labels_are_read(tmp_path: Path) -> None:
    x, ids, labels = np.ones((3, 2), np.float32), np.arange(6).reshape(3, 2), np.array([1, 0, 1])
    path = write(tmp_path / "r.npz", x=x, ids=ids, labels=labels)
    file = read_array_file(path, INPUTS)
    assert (file.rows, sorted(file.feeds)) == (3, ["ids", "x"])
    assert file.labels is not None
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
