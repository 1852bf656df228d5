"""What a step is expected to take."""

from __future__ import annotations

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import Decode, EngineEntry
from nestforge.runtime.generation.draft_gains import RunTime
from nestforge.runtime.generation.step_times import StepTimes


def engine(name: str, weight_bytes: int) -> EngineEntry:
    return EngineEntry(
        id=name,
        submodel=name,
        bucket=Bucket(64, 256, 1, 1),
        backend="onnxruntime",
        file=f"{name}.onnx",
        emitted="sliced",
        private_bytes=0,
        flops=0,
        moved_bytes=0,
        activation_bytes=0,
        kind=Decode(),
        weight_bytes=weight_bytes,
    )


LARGE, SMALL = engine("large", 40_000_000), engine("small", 10_000_000)


def test_before_any_run_the_bytes_say_it() -> None:
    times = StepTimes()
    assert times.expected_ms(LARGE, 1) == 4.0
    assert times.expected_ms(LARGE, 3) == 12.0
    assert times.expected_ms(SMALL, 1) == 1.0


def test_the_first_run_of_an_engine_does_not_count() -> None:
    times = StepTimes()
    times.ran(LARGE, 1, 500.0)
    assert times.expected_ms(LARGE, 1) == 4.0
    times.ran(LARGE, 1, 7.0)
    assert times.expected_ms(LARGE, 1) == 7.0


def test_what_one_took_is_scaled_by_bytes_of_weights() -> None:
    times = StepTimes()
    for ms in (8.0, 8.0):
        times.ran(LARGE, 1, ms)
    assert times.expected_ms(SMALL, 1) == 2.0
    for ms in (3.0, 3.0):
        times.ran(SMALL, 1, ms)
    assert (times.expected_ms(SMALL, 1), times.expected_ms(LARGE, 1)) == (3.0, 8.0)


def test_rows_that_have_not_run_are_reckoned_from_above() -> None:
    times = StepTimes()
    for ms in (8.0, 8.0):
        times.ran(LARGE, 4, ms)
    assert times.expected_ms(LARGE, 2) == 8.0
    assert times.expected_ms(LARGE, 6) == 12.0
    assert times.expected_ms(SMALL, 2) == 2.0


def test_an_odd_step_counts_for_little() -> None:
    times = StepTimes()
    for _ in range(9):
        times.ran(LARGE, 1, 4.0)
    times.ran(LARGE, 1, 4000.0)
    assert times.expected_ms(LARGE, 1) == pytest.approx(4.0 + 2.0 / 8)


def test_a_prompt_takes_a_step_a_token_until_one_has_run() -> None:
    times = StepTimes()
    assert times.expected_prompt_ms(LARGE, 10) == 40.0
    times.ran_prompt(LARGE, 20, 20.0)
    assert times.expected_prompt_ms(LARGE, 10) == 10.0
    assert times.expected_prompt_ms(SMALL, 10) == 2.5  # by its bytes, until it has read one
    times.ran_prompt(SMALL, 20, 40.0)
    assert times.expected_prompt_ms(SMALL, 10) == 20.0
    times.ran_prompt(SMALL, 1, 40.0)  # a turn of one token says little
    assert times.expected_prompt_ms(SMALL, 10) == 20.0


def test_checks_are_between_those_that_have_run() -> None:
    times = StepTimes()
    assert not times.is_known(LARGE, 1)
    for ms in (99.0, 10.0):
        times.ran(LARGE, 1, ms)
    assert times.is_known(LARGE, 1)
    assert times.expected_checks_ms(LARGE, 3) == [10.0] * 3
    for ms in (99.0, 18.0):
        times.ran_check(LARGE, 5, ms)
    assert times.expected_checks_ms(LARGE, 6) == [10.0, 12.0, 14.0, 16.0, 18.0, 18.0]


def test_what_is_known_is_where_others_start() -> None:
    times = StepTimes()
    for ms in (100.0, 8.0, 8.0, 8.0):
        times.ran(LARGE, 1, ms)
        times.ran_check(LARGE, 5, ms + 2)
    for ms in (100.0, 30.0):  # too seldom to be believed
        times.ran_check(LARGE, 3, ms)
    known = times.known([LARGE, SMALL])
    assert known == [RunTime("large", 1, 8.0), RunTime("large", 5, 10.0)]
    later = StepTimes()
    later.ran(LARGE, 1, 70.0)
    for time in known:
        later.start_from(LARGE, time)
    assert later.is_known(LARGE, 1)
    assert later.expected_checks_ms(LARGE, 5) == [8.0, 8.5, 9.0, 9.5, 10.0]
    later.ran(LARGE, 1, 4.0)
    assert later.expected_ms(LARGE, 1) == 6.0, "runs correct it"
    later.start_from(LARGE, RunTime("large", 1, 90.0))
    assert later.expected_ms(LARGE, 1) == 6.0, "what was seen counts more"
