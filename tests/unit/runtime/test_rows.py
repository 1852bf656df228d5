from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.rows import Rows, answers, buckets_of, rows_of


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
