"""Which draft is expected to write fastest, by what was accepted and what runs took."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.device_files.device_file import MeasuredHost
from nestforge.bundle.entries.engine_entry import EngineEntry
from nestforge.bundle.entries.generation_entry import CACHED
from nestforge.runtime.generation.calls.step_times import StepTimes
from nestforge.runtime.generation.draft_calibration import HostDrafts, JudgedDraft, RunTime
from nestforge.runtime.generation.drafting.drafts import Draft, NgramDraft
from nestforge.runtime.generation.drafting.gains import Gains

TARGET = EngineEntry(
    id="large",
    submodel="large",
    bucket=Bucket(64, 256, 1, 1),
    backend="onnxruntime",
    file="large.onnx",
    emitted="sliced",
    private_bytes=0,
    flops=0,
    moved_bytes=0,
    activation_bytes=0,
    segment=CACHED,
    weight_bytes=40_000_000,
)
STEP_MS = 10.0
HOST = MeasuredHost("cpu", "x86_64", 2)


class Costly(NgramDraft):
    """A draft each token of which takes so long."""

    def __init__(self, name: str, ms: float) -> None:
        self.name, self.expected_ms = name, ms


def gains(check_ms: float | None = None, tokens: int = 5) -> Gains:
    """Where a step takes 10 ms and, if stated, a check of ``tokens`` so many."""
    times = StepTimes()
    for _ in range(2):  # the first of a kind does not count
        times.ran(TARGET, 1, STEP_MS)
        if check_ms is not None:
            times.ran_check(TARGET, tokens, check_ms)
    return Gains(times)


def test_nothing_is_drafted_until_a_step_is_known() -> None:
    assert Gains(StepTimes()).ranked(TARGET, [NgramDraft()], 4) == []
    assert gains().ranked(TARGET, [], 4) == []
    assert gains().ranked(TARGET, [NgramDraft()], 0) == []


def test_a_draft_that_was_never_judged_is_tried() -> None:
    free: Draft = NgramDraft()
    (best,) = gains().ranked(TARGET, [free], 3)
    # No check has run: it is hoped to take what a step does, and 70 % of the tokens to be accepted.
    assert tuple(best) == (free, 3, pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3))


def test_the_number_of_tokens_follows_times_and_acceptance() -> None:
    half = Costly("half", 5.0)
    known = gains(check_ms=14.0)  # of five tokens; of two 11 ms, of three 12 ms
    known.checked(TARGET, "half", drafted=40, judged=36, accepted=33, ms=14.0)
    share = (33 + 0.7 * 4) / (36 + 4)
    assert known.share(TARGET, "half") == pytest.approx(share)
    (best,) = known.ranked(TARGET, [half], 4)
    expected = {
        count: 10 * sum(share**power for power in range(count + 1)) / (5 * count + 10 + count) for count in range(1, 5)
    }
    assert best.drafted == max(expected, key=lambda count: expected[count])
    assert best.factor == pytest.approx(expected[best.drafted])


def test_a_draft_that_is_refused_loses() -> None:
    known, half = gains(check_ms=14.0), Costly("half", 5.0)
    for _ in range(6):
        known.checked(TARGET, "half", drafted=2, judged=1, accepted=0, ms=12.0)
    (best,) = known.ranked(TARGET, [half], 4)
    assert best.factor < 0.9
    free = Costly("free", 0.0)
    assert [gain.draft for gain in known.ranked(TARGET, [half, free], 4)] == [free, half]


def test_a_later_generation_tries_again() -> None:
    known = gains()
    for _ in range(20):
        known.checked(TARGET, "half", drafted=1, judged=1, accepted=0, ms=10.0)
    shares = [known.share(TARGET, "half")]
    for _ in range(4):
        known.begin(TARGET)
        shares.append(known.share(TARGET, "half"))
    assert shares == sorted(shares)
    assert shares[0] < 0.12
    assert shares[-1] > 0.5
    other = replace(TARGET, id="other")
    known.checked(other, "half", drafted=1, judged=1, accepted=0, ms=10.0)
    before = known.share(other, "half")
    known.begin(TARGET)
    assert known.share(other, "half") == before


def test_what_was_judged_long_ago_is_forgotten() -> None:
    known = gains()
    for accepted in (0, 1):
        for _ in range(200):
            known.checked(TARGET, "half", drafted=1, judged=1, accepted=accepted, ms=10.0)
    assert known.share(TARGET, "half") > 0.9


def test_what_was_learned_is_where_others_start() -> None:
    known = gains(check_ms=14.0)
    known.checked(TARGET, "half", drafted=4, judged=4, accepted=3, ms=14.0)
    _, judged = known.found([TARGET])
    assert judged == [JudgedDraft("large", "half", 3.0, 4.0)]
    later = Gains(StepTimes())
    later.checked(TARGET, "other", drafted=1, judged=1, accepted=0, ms=9.0)
    found = HostDrafts(HOST, 1, "", 1, (RunTime("large", 1, 10.0),), (*judged, JudgedDraft("large", "other", 9.0, 9.0)))
    later.start_from(found, [TARGET])
    assert later.share(TARGET, "half") == known.share(TARGET, "half")
    assert later.share(TARGET, "other") == pytest.approx(2.8 / 5), "what was seen counts more"
    assert later.times.expected_ms(TARGET, 1) == 10.0
