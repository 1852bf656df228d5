from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import Latency, LatencyPoint, Noise
from nestforge.bundle.manifest import Manifest
from nestforge.errors import InputError
from nestforge.runtime.candidates import Candidate, Engine, batches, noise_hint, split, stated_latency
from nestforge.runtime.running_estimate import RunningEstimate
from support.latencies import latency

BUCKETS = st.lists(st.builds(Bucket, st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=5)


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


def test_a_batch_has_at_most_as_many_rows_as_were_requested() -> None:
    lengths, buckets = np.array([3, 9, 8, 1, 16]), [Bucket(4, 8), Bucket(2, 16)]
    for most, expected in ((1, [[4], [1], [2], [0], [3]]), (3, [[4, 1], [2, 0, 3]]), (9, [[4, 1], [2, 0, 3]])):
        assert [batch.tolist() for batch in batches(lengths, buckets, False, most)] == expected


def test_a_row_longer_than_every_bucket_is_refused_before_any_batch() -> None:
    with pytest.raises(InputError, match=r"^row 2: 20 steps, the largest bucket takes 16; shorten it, truncate texts"):
        next(batches(np.array([3, 8, 20, 19]), [Bucket(1, 8), Bucket(2, 16)], truncate=False))


def test_short_rows_go_together_in_a_range_beside_a_bucket_of_one_row() -> None:
    buckets = [Bucket(1, 32), Bucket(8, 512, 1, 1)]
    found = [len(part) for part in batches(np.full(16, 5), buckets, truncate=False)]
    assert found == [8, 8]
    static = [len(part) for part in batches(np.full(4, 5), [Bucket(1, 32), Bucket(8, 512)], truncate=False)]
    assert static == [1, 1, 1, 1]


def test_a_split_knows_each_run_and_how_many_there_are_of_a_shape() -> None:
    found = split(np.array([3, 9, 0, 8]), [Bucket(1, 16, 1, 1)])
    assert [(rows.tolist(), str(shape)) for rows, shape in found.parts] == [
        ([1], "1x9"),
        ([3], "1x8"),
        ([0], "1x3"),
        ([2], "1x1"),
    ]
    assert split(np.full(5, 4), [Bucket(2, 8)]).counts == {Bucket(2, 4): 2, Bucket(1, 4): 1}


RANGE = Bucket(4, 64, 1, 8)
NOISY = Noise(3, 0.1, 2.0)


def engine(manifest: Manifest, noise: Noise | None = None) -> Engine:
    """1 ms per 8 tokens of length, measured at four lengths."""
    points = tuple(LatencyPoint(1, length, 9.0, length / 8, noise=noise) for length in (8, 16, 32, 64))
    stated = stated_latency([latency("e", 9.0, 8.0, points=points)], "packed", None)
    entry = replace(manifest.engines[0], id="e", bucket=RANGE)
    return Engine(entry, stated, 20.0, RunningEstimate(lambda: None))


def ran(found: Callable[[], Candidate], ratio: float) -> None:
    for _ in range(5):
        choice = found().choice("")
        choice.ran(choice.stated_ms * ratio, 0.0)


def test_runs_correct_the_figure_and_the_text_says_whose_they_were(manifest: Manifest) -> None:
    one = engine(manifest)
    ran(lambda: one.candidate(Bucket(1, 16)), 3.0)
    found = one.candidate(Bucket(1, 16))
    assert (found.latency_ms, found.stated_ms) == (pytest.approx(6.0), 2.0)
    assert str(found).endswith("(measured here 2 ms, seen while running: 6 ms, 20.0 MB)")
    other = replace(one, entry=replace(one.entry, id="other")).candidate(Bucket(1, 16))
    assert other.latency == "measured here 2 ms, by what else ran here: 6 ms"


def test_a_noisy_figure_is_one_until_runs_have_shown_another(manifest: Manifest) -> None:
    one = engine(manifest, NOISY)
    before = one.candidate(Bucket(1, 16))
    assert (before.is_noisy, before.latency) == (True, "measured here 2 ms, noisy")
    assert noise_hint([before]).startswith("; noisy figures are not to be trusted")
    ran(lambda: one.candidate(Bucket(1, 16)), 3.0)
    after = one.candidate(Bucket(1, 16))
    assert (after.is_noisy, noise_hint([after])) == (False, "")


def test_the_longest_sequence_within_a_limit_follows_what_runs_take(manifest: Manifest) -> None:
    one = engine(manifest)
    assert one.longest_sequence(1, {}) == 64
    assert one.longest_sequence(1, {"latency_ms": 4.0}) == 32
    for length in (8, 16, 32, 64):
        ran(lambda length=length: one.candidate(Bucket(1, length)), 0.5)
    assert one.longest_sequence(1, {"latency_ms": 4.0}) == 64


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ([], "no latency known"),
        ([latency("e", 0.0)], "predicted 0 ms"),
        ([latency("e", 5e-324)], "predicted 4.94e-324 ms"),
    ],
)
def test_runs_of_engines_without_a_figure_are_not_counted(manifest: Manifest, known: list[Latency], text: str) -> None:
    one = replace(engine(manifest), stated=stated_latency(known, "packed", None))
    for _ in range(5):
        one.candidate(Bucket(1, 16)).choice("").ran(1.0, 0.0)
    assert one.candidate(Bucket(1, 16)).latency == text
