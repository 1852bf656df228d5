from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.rows import Rows, answers, batches, buckets_of, rows_of

BUCKETS = st.lists(st.builds(Bucket, st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=5)


@pytest.fixture
def model(tiny_bundle: Path) -> Iterator[ElasticModel]:
    with nestforge.load(tiny_bundle, threads=1) as opened:
        yield opened


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), buckets=BUCKETS, truncate=st.booleans())
def test_every_row_is_in_one_batch_that_its_bucket_takes(
    lengths: list[int], buckets: list[Bucket], truncate: bool
) -> None:
    longest = max(bucket.sequence for bucket in buckets)
    assume(truncate or max(lengths) <= longest)
    seen: list[int] = []
    for batch in batches(np.array(lengths), buckets, truncate):
        steps = max(min(lengths[row], longest) for row in batch)
        sequence = min(bucket.sequence for bucket in buckets if bucket.sequence >= steps)
        assert all(
            min(b.sequence for b in buckets if b.sequence >= min(lengths[r], longest)) == sequence for r in batch
        )
        assert len(batch) <= max(bucket.batch for bucket in buckets if bucket.sequence == sequence)
        seen += batch.tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_batches_are_as_large_as_a_bucket_takes() -> None:
    buckets = [Bucket(1, 8), Bucket(4, 8), Bucket(2, 16)]
    found = [batch.tolist() for batch in batches(np.array([3, 9, 8, 1, 16, 2, 8, 10]), buckets, truncate=False)]
    assert found == [[4, 7], [1], [2, 6, 0, 5], [3]]


def test_a_batch_has_at_most_as_many_rows_as_were_asked_for() -> None:
    lengths, buckets = np.array([3, 9, 8, 1, 16]), [Bucket(4, 8), Bucket(2, 16)]
    for most, expected in ((1, [[4], [1], [2], [0], [3]]), (3, [[4, 1], [2, 0, 3]]), (9, [[4, 1], [2, 0, 3]])):
        assert [batch.tolist() for batch in batches(lengths, buckets, False, most)] == expected


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


def test_a_row_longer_than_every_bucket_is_refused_before_any_batch() -> None:
    with pytest.raises(InputError, match=r"^row 2: 20 steps, the largest bucket takes 16; shorten it, truncate texts"):
        next(batches(np.array([3, 8, 20, 19]), [Bucket(1, 8), Bucket(2, 16)], truncate=False))


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


def test_short_rows_go_together_in_a_range_beside_a_bucket_of_one_row() -> None:
    buckets = [Bucket(1, 32), Bucket(8, 512, 1, 1)]
    found = [len(part) for part in batches(np.full(16, 5), buckets, truncate=False)]
    assert found == [8, 8]
    static = [len(part) for part in batches(np.full(4, 5), [Bucket(1, 32), Bucket(8, 512)], truncate=False)]
    assert static == [1, 1, 1, 1]
