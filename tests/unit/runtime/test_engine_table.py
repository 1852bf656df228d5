from __future__ import annotations

from dataclasses import replace

import pytest
from nestforge.bundle.manifest import Manifest
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.in_flight import LoadEstimate
from nestforge.runtime.request import Request
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
    assert tried is not None
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
