import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import InputError
from nestforge.runtime.calibrate import data as labelled_data
from nestforge.runtime.calibrate.data import LEAST_ROWS_TO_SPLIT, read_data, split
from support.exit_bundles import LONGEST, make_rows, write_arrays, write_exits_bundle, write_text_bundle, write_texts


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return open_bundle(write_text_bundle(tmp_path_factory.mktemp("bundles") / "text.bundle"))


def error_of(path: Path, bundle: Bundle, **options: Any) -> str:
    """The message, without the file's name."""
    with pytest.raises(InputError) as failure:
        read_data(path, bundle, LONGEST, **options)
    assert "\n" not in str(failure.value)
    assert str(failure.value).startswith(f"{path}: ")
    return str(failure.value).removeprefix(f"{path}: ")


def lines_of(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_arrays_are_read(bundle: Bundle, tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "rows.npz", 20)
    data = read_data(path, bundle, LONGEST)
    rows = make_rows(20)
    assert set(data.feeds) == {"input_ids", "attention_mask"}
    assert np.array_equal(data.feeds["input_ids"], rows["input_ids"])
    assert data.labels is not None
    assert np.array_equal(data.labels, rows["labels"])
    assert data.lengths.tolist() == rows["attention_mask"].sum(axis=1).tolist()
    assert (data.rows, data.truncated) == (20, 0)
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_padding_that_every_row_has_is_cut(bundle: Bundle, tmp_path: Path) -> None:
    rows = {name: np.pad(array, ((0, 0), (0, 100))) for name, array in make_rows(5).items() if name != "labels"}
    np.savez(tmp_path / "rows.npz", **rows)
    data = read_data(tmp_path / "rows.npz", bundle, LONGEST)
    assert data.feeds["input_ids"].shape == (5, LONGEST)
    assert data.labels is None


def test_where_padding_changes_answers_it_counts(tmp_path: Path) -> None:
    untrimmed = open_bundle(write_exits_bundle(tmp_path / "untrimmed.bundle", trims=False))
    path = write_arrays(tmp_path / "rows.npz", 5)
    assert read_data(path, untrimmed, LONGEST).lengths.tolist() == [LONGEST] * 5
    with pytest.raises(InputError, match="row 0 has 16 steps, the largest bucket for such requests takes 8"):
        read_data(path, untrimmed, 8)


def test_texts_are_read(bundle: Bundle, tmp_path: Path) -> None:
    data = read_data(lines_of(tmp_path, {"text": "w3 w1", "label": 2}, {"text": "w4", "label": 0}), bundle, LONGEST)
    assert data.feeds["input_ids"].tolist() == [[3, 1], [4, 0]]
    assert data.lengths.tolist() == [2, 1]
    assert data.labels.tolist() == [2, 0]


def test_truncation_is_asked_for_and_counted(bundle: Bundle, tmp_path: Path) -> None:
    path = lines_of(tmp_path, {"text": "w1"}, {"text": "w2 " * 40})
    message = error_of(path, bundle)
    assert message.startswith("line 2: more than 16 tokens, which the largest bucket for such requests takes; ")
    data = read_data(path, bundle, LONGEST, truncate=True)
    assert (data.truncated, data.labels) == (1, None)
    assert data.lengths.tolist() == [1, 16]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["not json"], 'line 1: expected a JSON object such as {"text": "...", "label": 0}'),
        (['{"text": "w1"}', ""], 'line 2: expected a JSON object such as {"text": "...", "label": 0}'),
        (["[" * 100_000], 'line 1: expected a JSON object such as {"text": "...", "label": 0}'),
        ([{"label": 1}], "line 1: expected a 'text', got None"),
        ([{"text": 3}], "line 1: expected a 'text', got 3"),
        (
            [{"text": "w1"}, {"text": "w1", "lable": 1}],
            "line 2: unknown key 'lable'; expected 'text' and perhaps 'label'",
        ),
        (['{"text": "\\ud800"}'], "line 1: 'text': half of a surrogate pair, which is no character"),
        ([{"text": "w1", "label": True}], "line 1: label True: expected a whole number, 0..2"),
        ([["w1", 0]], 'line 1: expected a JSON object such as {"text": "...", "label": 0}'),
        ([{"text": "w1", "label": "spam"}], "line 1: label 'spam': expected a whole number, 0..2"),
        ([{"text": "w1", "label": 1.0}], "line 1: label 1.0: expected a whole number, 0..2"),
        ([{"text": "w1", "label": 3}], "line 1: label 3: expected a whole number, 0..2"),
        ([{"text": "w1", "label": -1}], "line 1: label -1: expected a whole number, 0..2"),
        (
            [{"text": "w1", "label": 0}, {"text": "w1"}],
            "line 2: has no 'label', and other lines have; label all rows or none",
        ),
        (
            [{"text": "w1"}, {"text": "w1", "label": 0}],
            "line 1: has no 'label', and other lines have; label all rows or none",
        ),
        ([], "has no rows"),
    ],
)
def test_bad_lines_are_named(bundle: Bundle, tmp_path: Path, lines: list[object], message: str) -> None:
    assert error_of(lines_of(tmp_path, *lines), bundle) == message


def test_bytes_that_are_no_text(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "w1"}\n{"text": "\xff"}\n')
    assert error_of(path, bundle) == "line 2: not UTF-8"


def renamed(rows: dict[str, Any]) -> dict[str, Any]:
    return {"ids": rows.pop("input_ids"), **rows}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (renamed, "inputs attention_mask, ids: expected exactly attention_mask, input_ids"),
        (lambda rows: {**rows, "label": np.zeros(4)}, "label: expected exactly attention_mask, input_ids"),
        (lambda rows: {**rows, "labels": np.zeros(4)}, "labels: expected 4 whole numbers, got float64 of shape [4]"),
        (lambda rows: {**rows, "labels": np.zeros(3, int)}, "labels: expected 4 whole numbers, got int64 of shape [3]"),
        (lambda rows: {**rows, "labels": np.array([0, 1, 3, 0])}, "labels: row 2 has 3, expected 0..2"),
        (lambda rows: {name: array[:0] for name, array in rows.items()}, "has no rows"),
        (lambda rows: {**rows, "input_ids": rows["input_ids"] + 99}, "input input_ids: values"),
        (
            lambda rows: {"input_ids": np.ones((4, 17), int), "attention_mask": np.eye(4, 17, 13, int)},
            "row 3 has 17 steps, the largest bucket for such requests takes 16; shorten it, or compile with",
        ),
    ],
)
def test_bad_arrays_are_named(
    bundle: Bundle, tmp_path: Path, edit: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    path = tmp_path / "rows.npz"
    np.savez(path, **edit(make_rows(4)))
    assert message in error_of(path, bundle)


def test_sizes_are_bounded_before_anything_is_read(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, texts = write_arrays(tmp_path / "rows.npz", 10), write_texts(tmp_path / "rows.jsonl", 10)
    zeros = tmp_path / "zeros.npz"
    np.savez_compressed(zeros, input_ids=np.zeros((100, 100), np.int64))
    monkeypatch.setattr(labelled_data, "MAX_BYTES", 4000)
    assert "unpacks to" in error_of(zeros, bundle)
    monkeypatch.setattr(labelled_data, "MAX_BYTES", 10)
    assert "more than the 10 allowed" in error_of(texts, bundle)
    monkeypatch.undo()
    monkeypatch.setattr(labelled_data, "MAX_ROWS", 9)
    for path in (arrays, texts):
        assert error_of(path, bundle) == "10 rows, more than the 9 allowed; some thousand are enough"


def test_files_of_other_kinds(bundle: Bundle, tmp_path: Path) -> None:
    assert error_of(tmp_path / "rows.csv", bundle) == "expected a file that ends in .npz or .jsonl"
    for name in ("none.npz", "none.jsonl"):
        assert error_of(tmp_path / name, bundle) == "cannot be read (No such file or directory)"
    arrays = write_arrays(tmp_path / "rows.npz", 10)
    assert "truncate applies to text only" in error_of(arrays, bundle, truncate=True)
    plain = open_bundle(write_exits_bundle(tmp_path / "plain.bundle"))
    assert "has no tokenizer" in error_of(write_texts(tmp_path / "rows.jsonl", 2), plain)


def test_the_split_follows_content_alone(bundle: Bundle, tmp_path: Path) -> None:
    data = read_data(write_arrays(tmp_path / "rows.npz", 300), bundle, LONGEST)
    inside, outside = split(data)
    assert inside.rows + outside.rows == 300
    assert 70 < outside.rows < 130
    # Other rows, another order and other padding leave every row on its side.
    wider = read_data(write_arrays(tmp_path / "same.npz", 300), bundle, LONGEST)
    feeds = {name: np.pad(array, ((0, 0), (0, 3))) for name, array in wider.feeds.items()}
    shuffled = labelled_data.LabelledData(feeds, wider.lengths, wider.labels, 0, "").take(np.arange(299, 99, -1))
    _, outside_too = split(shuffled)
    known = {tuple(row[:LONGEST]) for row in outside_too.feeds["input_ids"].tolist()}
    assert known <= {tuple(row) for row in outside.feeds["input_ids"].tolist()}


def test_too_few_or_equal_rows_all_calibrate(bundle: Bundle, tmp_path: Path) -> None:
    data = read_data(write_arrays(tmp_path / "rows.npz", LEAST_ROWS_TO_SPLIT - 1), bundle, LONGEST)
    assert split(data) == (data, None)
    same = data.take(np.zeros(100, int))
    assert split(same) == (same, None)
