"""The table of engines, and rows that a model splits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bundle.manifest import Manifest
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.in_flight import LoadEstimate
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.request import Request
from nestforge.runtime.rows import Rows, answers, buckets_of, rows_of
from support.three_submodels import BUCKETS, SIZES, dispatcher, make


@pytest.fixture
def three(manifest: Manifest) -> Manifest:
    """Submodels of 1, 2 and 4 ms a row of 32 steps, at 1x32, 1x128 and 4x32."""
    return make(manifest, SIZES, BUCKETS)


def test_rows_that_no_engine_takes_at_once_go_in_runs_whose_times_add_up(three: Manifest) -> None:
    choice = dispatcher(three).choose(Request(), 10, 20)
    assert [(rows.tolist(), one.engine.id) for rows, one in choice.runs] == [
        ([0, 1, 2, 3], "large@b4-s32"),
        ([4, 5, 6, 7], "large@b4-s32"),
        ([8, 9], "large@b4-s32"),
    ]
    assert choice.latency_ms == 3 * 16
    assert choice.engine.id == "large@b4-s32"
    assert choice.reason == (
        "no limit given: the largest submodel; 10 rows in 3 runs, since no engine takes them at once"
    )


def test_a_limit_in_time_is_for_all_runs_together(three: Manifest) -> None:
    chooser = dispatcher(three)
    choice = chooser.choose(Request(latency_ms=24), 10, 20)
    assert (choice.engine.submodel, choice.latency_ms, len(choice.runs)) == ("medium", 24, 3)
    assert choice.reason.startswith(
        "24 ms in 3 runs, the longest predicted 8 ms <= 24 ms; next larger large (48 ms in 3 runs, the longest"
    )
    in_time = chooser.choose_in_time(Request(deadline_ms=20), 10, 20, LoadEstimate([], 1), spent_ms=1.0)
    assert (in_time.engine.submodel, in_time.latency_ms) == ("small", 12)
    with pytest.raises(SelectionError, match=r"10x20 with `latency_ms` <= 11; there is large \(48 ms in 3 runs"):
        chooser.choose(Request(latency_ms=11), 10, 20)
    tried = chooser.to_try(Request(latency_ms=11), 10, 20)
    assert (tried.engine.submodel, tried.is_new, len(tried.runs)) == ("small", True, 3)


def test_texts_are_counted_at_their_own_lengths(three: Manifest) -> None:
    """One long row does not make the others long: it alone needs the bucket of 128 steps."""
    choice = dispatcher(three).choose(Request(latency_ms=32), 5, 100, (8, 8, 100, 8, 8))
    assert [(rows.tolist(), one.engine.id) for rows, one in choice.runs] == [
        ([2], "large@b1-s128"),
        ([0, 1, 3, 4], "large@b4-s32"),
    ]
    assert choice.latency_ms == 32
    assert dispatcher(three).choose(Request(latency_ms=32), 5, 100).engine.submodel == "small", "all of 100 steps"


def test_one_engine_that_takes_them_goes_before_runs(three: Manifest) -> None:
    assert dispatcher(three).choose(Request(), 4, 32).runs == ()
    assert dispatcher(three).choose(Request(submodel="S"), 2, 33).engine.id == "small@b1-s128"


def test_memory_is_that_of_one_run_at_a_time(three: Manifest) -> None:
    assert dispatcher(three).choose(Request(memory_mb=21), 10, 20).engine.submodel == "medium"


def test_arrays_that_are_not_one_row_after_the_other_are_not_split(three: Manifest) -> None:
    total = replace(three.outputs[-1], name="sum", dims=(16,))
    whole = dispatcher(replace(three, outputs=(*three.outputs, total)))
    with pytest.raises(InputError, match=r"5 rows x 8 is larger than every bucket .* answered one by one; send less"):
        whole.choose(Request(), 5, 8)
    assert [whole.longest_sequence(rows, Request()) for rows in (1, 4)] == [128, 32]


def test_the_rows_of_one_request_are_bounded(three: Manifest) -> None:
    with pytest.raises(InputError, match="input of 1048577 rows: at most 1048576 go in runs; send less at once"):
        dispatcher(three).choose(Request(), 2**20 + 1, 8)


@pytest.fixture
def model(tiny_bundle: Path) -> Iterator[ElasticModel]:
    with nestforge.load(tiny_bundle, threads=1) as opened:
        yield opened


def test_rows_in_batches_are_answered_as_alone(model: ElasticModel) -> None:
    texts = ["a nest", "nest of models", "a " * 9, "a nest of models", "a nest " * 10]
    rows, buckets = rows_of(model, texts, truncate=True), buckets_of(model, "ffn32")
    found = list(answers(model, rows, buckets, truncate=True, submodel="ffn32"))
    assert [(part.tolist(), answer.truncated) for part, answer in found] == [
        ([4, 2], (0,)),
        ([3], ()),
        ([1], ()),
        ([0], ()),
    ]
    for part, answer in found:
        for row, total in zip(part, answer["total"], strict=True):
            np.testing.assert_array_equal(total, model(texts[row], truncate=True, submodel="ffn32")["total"][0])


def test_a_submodel_without_an_engine_here_has_no_buckets(model: ElasticModel) -> None:
    with pytest.raises(SelectionError, match=r"^submodel ffn8 has no engine here"):
        buckets_of(model, "ffn8")


def test_texts_and_arrays_are_rows(model: ElasticModel) -> None:
    texts = rows_of(model, ["a nest", "nest of models"])
    assert (texts.texts, texts.lengths.tolist()) == (("a nest", "nest of models"), [4, 5])
    assert texts.take(np.array([1, 0])) == ["nest of models", "a nest"]
    arrays = rows_of(model, {name: np.ones((3, 5), np.int64) for name in ("input_ids", "attention_mask")})
    assert (arrays.texts, arrays.lengths.tolist()) == (None, [5, 5, 5])
    assert {name: array.shape for name, array in arrays.take(np.array([2])).items()} == dict.fromkeys(
        ("input_ids", "attention_mask"), (1, 5)
    )
    assert isinstance(texts.first(1), Rows)
    assert (texts.first(1).texts, arrays.first(2).lengths.tolist()) == (("a nest",), [5, 5])


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ([], "corpus: expected texts or arrays by name, got []"),
        ("one text", "corpus: expected texts or arrays by name, got 'one text'"),
        (["a", 3], "text 1: expected text, got 3"),
        ({"input_ids": np.ones((1, 2), np.int64)}, "inputs input_ids: expected exactly attention_mask, input_ids"),
    ],
)
def test_refuses_what_is_no_corpus(model: ElasticModel, corpus: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        rows_of(model, corpus)
    assert str(error.value) == message
