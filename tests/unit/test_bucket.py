from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket


@given(st.integers(1, 2**11), st.integers(1, 2**11))
def test_buckets_are_read_in_both_spellings(batch: int, sequence: int) -> None:
    bucket = Bucket(batch, sequence)
    assert Bucket.parse(bucket.label) == Bucket.parse(f" {batch}x{sequence} ") == bucket
    assert bucket.tokens == batch * sequence


@pytest.mark.parametrize(
    "text", ["", "1", "1x", "x8", "0x8", "1x0", "-1x8", "1x8x2", "1 x 8", "1x8\n9", "\u0661x8", "1e2x8"]
)
def test_what_is_no_bucket(text: str) -> None:
    with pytest.raises(ValueError, match="expected BATCHxSEQUENCE, such as 1x128"):
        Bucket.parse(text)


def test_buckets_are_ordered_by_batch_then_sequence() -> None:
    assert sorted([Bucket(2, 8), Bucket(1, 128), Bucket(1, 32)]) == [Bucket(1, 32), Bucket(1, 128), Bucket(2, 8)]


def test_a_range_is_read_in_both_spellings_and_knows_its_ends() -> None:
    bucket = Bucket.parse("1..8x1..512")
    assert bucket == Bucket(8, 512, 1, 1) == Bucket.parse(bucket.label) == Bucket.parse(str(bucket))
    assert (bucket.label, str(bucket), bucket.free) == ("b1_8-s1_512", "1..8x1..512", ("batch", "sequence"))
    assert (bucket.smallest, bucket.largest, bucket.tokens) == (Bucket(1, 1), Bucket(8, 512), 4096)
    assert Bucket.parse("4x2..16").smallest == Bucket(4, 2)
    assert not bucket.is_static and Bucket(1, 128).is_static  # noqa: PT018  (one property)
    assert sorted([bucket, Bucket(8, 512)]) == [bucket, Bucket(8, 512)]


def test_what_runs_of_a_request_in_a_bucket() -> None:
    bucket = Bucket(8, 64, None, 4)
    assert bucket.holds(Bucket(3, 64))
    assert not bucket.holds(Bucket(3, 65))
    assert bucket.filled(Bucket(3, 2)) == Bucket(8, 4)
    assert bucket.filled(Bucket(3, 33)) == Bucket(8, 33)
    assert bucket.nearest(Bucket(1, 100)) == Bucket(8, 64)
    assert Bucket(1, 128).filled(Bucket(1, 5)) == Bucket(1, 128)


@pytest.mark.parametrize("text", ["1x128..1", "1x5..5", "1x0..8", "8..1x3"])
def test_a_range_rises(text: str) -> None:
    with pytest.raises(ValueError, match="expected one that rises from 1 or more"):
        Bucket.parse(text)


def test_the_sequences_of_a_range_double_from_end_to_end() -> None:
    assert Bucket.parse("1x1..16").doublings == (1, 2, 4, 8, 16)
    assert Bucket.parse("1..4x5..40").doublings == (5, 8, 16, 32, 40)
    assert Bucket(3, 7).doublings == (7,)
