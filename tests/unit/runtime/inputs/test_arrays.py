from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.entries.tensor_spec import RowNeed, TensorSpec
from nestforge.errors import InputError
from nestforge.runtime.inputs.arrays import InputChecker, cut_back, nearest_shape, random_feeds

IDS = TensorSpec("ids", "int64", ("batch", "sequence"), pad=9, high=10)
FLAGS = TensorSpec("flags", "bool", ("batch",), pad=1)
PIXELS = TensorSpec("pixels", "float32", ("batch", 3, 2))


def feeds(**changes: object) -> dict[str, Any]:
    return {"ids": np.zeros((2, 5), np.int64), "flags": np.zeros(2, np.bool_), **changes}


def test_shape_is_the_inputs_own() -> None:
    checker = InputChecker([IDS, FLAGS])
    assert checker.shape_of(feeds()) == Bucket(2, 5)
    assert checker.own_shape(Bucket(2, 5), Bucket(4, 8)) == Bucket(2, 5)


def test_a_model_without_sequence_takes_the_buckets() -> None:
    checker = InputChecker([PIXELS])
    shape = checker.shape_of({"pixels": np.zeros((2, 3, 2), np.float32)})
    assert (shape, checker.own_shape(shape, Bucket(4, 8))) == (Bucket(2, 1), Bucket(2, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": 1}, "inputs flags, ids, mask: expected exactly flags, ids"),
        ({"ids": [[1, 2]]}, "input ids: expected a numpy array of int64, got list"),
        ({"ids": np.zeros((2, 5), np.int32)}, "input ids: expected a numpy array of int64, got int32"),
        ({"ids": np.zeros((2, 5), ">i8")}, "input ids: expected a numpy array of int64, got >i8"),
        ({"ids": np.zeros(5, np.int64)}, "input ids: expected int64 [batch, sequence], got shape [5]"),
        ({"ids": np.zeros((2, 0), np.int64)}, "input ids: expected int64 [batch, sequence], got shape [2, 0]"),
        (
            {"flags": np.zeros(3, np.bool_)},
            "input flags: expected bool [batch], got shape [3] (batch is 2 in another input)",
        ),
        ({"ids": np.full((2, 5), 10)}, "input ids: values 10..10, expected 0..9; do they come from this bundle's own"),
        ({"ids": np.array([[0, -1], [3, 4]])}, "input ids: values -1..4, expected 0..9"),
    ],
)
def test_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        InputChecker([IDS, FLAGS]).shape_of(feeds(**changes))
    assert str(error.value).startswith(message)


class Odd:
    """An array in name, whose shape is none."""

    dtype = np.dtype(np.int64)
    shape = ([2], 5)  # cannot even be hashed


class Worse:
    @property
    def shape(self) -> object:
        raise RuntimeError("no shape")


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.ma.masked_equal(np.zeros((2, 5), np.int64), 0), "MaskedArray, whose mask no model sees; fill it: array.f"),
        (np.zeros((2, 5), np.int64).view(np.matrix), "matrix; pass numpy.asarray of it"),
        (np.rec.array(np.zeros((2, 5), np.int64)), "recarray; pass numpy.asarray of it"),
        (Odd(), "Odd"),
        (Worse(), "Worse"),
        (type("x" * 5000, (), {})(), "x" * 80),
    ],
    ids=["masked", "matrix", "records", "odd", "worse", "long"],
)
def test_what_is_almost_an_array_is_refused(array: object, got: str) -> None:
    checker = InputChecker([IDS, FLAGS])
    for _ in range(2):
        with pytest.raises(InputError) as error:
            checker.shape_of(feeds(ids=array))
        assert str(error.value).startswith(f"input ids: expected a numpy array of int64, got {got}")
        assert len(str(error.value)) < 200


def test_a_mapped_file_is_an_array(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.zeros((2, 5), np.int64))
    mapped = np.load(tmp_path / "ids.npy", mmap_mode="r")
    assert InputChecker([IDS, FLAGS]).shape_of(feeds(ids=mapped)) == Bucket(2, 5)


def test_long_and_many_names_are_cut() -> None:
    for names in (["x" * 10**6], [f"input {number}" for number in range(10**4)]):
        with pytest.raises(InputError) as error:
            InputChecker([IDS, FLAGS]).shape_of(dict.fromkeys(names, np.zeros(1)))
        assert len(str(error.value)) < 2000


def test_sizes_are_known_without_a_look_at_the_values() -> None:
    checker, wrong = InputChecker([IDS, FLAGS]), feeds(ids=np.full((2, 5), 10))
    assert checker.sizes_of(wrong) == Bucket(2, 5)
    with pytest.raises(InputError, match=r"input ids: values 10\.\.10"):
        checker.check_values(wrong)


def test_refuses_a_missing_input_and_a_wrong_fixed_size() -> None:
    with pytest.raises(InputError, match="inputs none: expected exactly pixels"):
        InputChecker([PIXELS]).shape_of({})
    with pytest.raises(InputError, match=r"input pixels: expected float32 \[batch, 3, 2\], got shape \[1, 3, 4\]$"):
        InputChecker([PIXELS]).shape_of({"pixels": np.zeros((1, 3, 4), np.float32)})


def test_fills_with_each_inputs_pad() -> None:
    full = InputChecker([IDS, FLAGS]).filled({"ids": np.array([[1, 2]]), "flags": np.array([False])}, Bucket(2, 3))
    assert full["ids"].tolist() == [[1, 2, 9], [9, 9, 9]]
    assert full["flags"].tolist() == [False, True]


def test_an_input_without_pad_must_fit_exactly() -> None:
    checker = InputChecker([PIXELS])
    exact = {"pixels": np.zeros((2, 3, 2), np.float32)}
    assert checker.filled(exact, Bucket(2, 8))["pixels"] is exact["pixels"]
    with pytest.raises(
        InputError, match=r"input pixels: cannot be padded, and shape \[2, 3, 2\] is not .* \[4, 3, 2\]"
    ):
        checker.filled(exact, Bucket(4, 8))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2), st.integers(0, 3))
def test_cutting_back_undoes_filling(batch: int, sequence: int, rows: int, steps: int) -> None:
    spec = TensorSpec("x", "float32", ("batch", "sequence", 2), pad=7)
    given_shape, bucket = Bucket(batch, sequence), Bucket(batch + rows, sequence + steps)
    array = np.random.default_rng(0).standard_normal((batch, sequence, 2)).astype(np.float32)
    full = InputChecker([spec]).filled({"x": array}, bucket)["x"]
    (back,) = cut_back([full], [spec], given_shape)
    assert full.shape == (*(bucket.batch, bucket.sequence), 2)
    assert np.array_equal(back, array)
    assert back.base is None


def _masked(need: RowNeed) -> InputChecker:
    tokens = ("batch", "sequence")
    ids = TensorSpec("ids", "int64", tokens, pad=0, high=9)
    return InputChecker((ids, TensorSpec("mask", "int64", tokens, pad=0, high=2, row_needs=need)))


@pytest.mark.parametrize(
    ("need", "rows", "message"),
    [
        ("token", [[1, 1], [0, 1]], None),
        (
            "token",
            [[1, 0], [0, 0], [0, 0]],
            r"^input mask: row 1 has no token: its mask is 0 throughout, ",
        ),
        ("first_token", [[1, 1], [1, 0]], None),
        ("first_token", [[1, 1], [0, 1]], r"^input mask: row 1 does not begin with a token: .*; pad on the right$"),
    ],
)
def test_a_row_without_what_it_needs_is_refused_by_its_number(
    need: RowNeed, rows: list[list[int]], message: str | None
) -> None:
    checker, mask = _masked(need), np.array(rows)
    feeds = {"ids": np.ones_like(mask), "mask": mask}
    for _ in range(2):  # shapes are remembered, values are not
        if message is None:
            assert checker.shape_of(feeds) == Bucket(len(rows), 2)
        else:
            with pytest.raises(InputError, match=message):
                checker.shape_of(feeds)


def test_rows_that_fill_a_bucket_need_nothing() -> None:
    checker, ones = _masked("token"), np.ones((1, 2), np.int64)
    feeds = {"ids": ones, "mask": ones}
    assert checker.shape_of(feeds) == Bucket(1, 2)
    assert checker.filled(feeds, Bucket(3, 4))["mask"].tolist() == [[1, 1, 0, 0], [0] * 4, [0] * 4]


SPECS = (
    TensorSpec("ids", "int64", ("batch", "sequence"), pad=0, high=7),
    TensorSpec("free", "int32", ("batch",)),
    TensorSpec("flags", "bool", ("batch", "sequence")),
    TensorSpec("pixels", "float16", ("batch", 3)),
)


def test_feeds_are_what_the_model_takes() -> None:
    feeds = random_feeds(SPECS, Bucket(4, 64))
    assert InputChecker(SPECS).shape_of(feeds) == Bucket(4, 64)
    assert set(np.unique(feeds["ids"])) == set(range(7))
    assert not feeds["free"].any()
    assert set(np.unique(feeds["flags"])) == {False, True}
    assert feeds["pixels"].std() > 0


def test_the_seed_decides() -> None:
    first, again, other = (random_feeds(SPECS, Bucket(2, 8), seed) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["ids"], other["ids"])


def test_the_shape_of_a_range_that_feeds_have_or_come_nearest_to() -> None:
    feeds = random_feeds(SPECS, Bucket(3, 20))
    assert nearest_shape(SPECS, feeds, Bucket(4, 64, 1, 1)) == Bucket(3, 20)
    assert nearest_shape(SPECS, feeds, Bucket(2, 64, 1, 32)) == Bucket(2, 32)
    assert nearest_shape(SPECS, feeds, Bucket(4, 64)) == Bucket(4, 64)
    assert nearest_shape(SPECS, {**feeds, "flags": feeds["flags"][:2]}, Bucket(4, 64, 1, 1)) == Bucket(3, 20)
    assert nearest_shape(SPECS, {}, Bucket(4, 64, 1, 1)) == Bucket(4, 64)
