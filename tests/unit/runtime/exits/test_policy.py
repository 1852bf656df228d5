"""Policies of exits, and how far entropies drift."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import SelectionError
from nestforge.runtime.exits.choice import BLOCK_ROWS, LEAST_ROWS, Drift, ExitMonitor, compare_exits
from nestforge.runtime.exits.policy import ExitPolicy, check_count, closed, thresholds_for
from support.exit_bundles import policy

ENTROPIES = np.array([0.0, 0.25, 0.3, np.nan], np.float32).tolist()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (ExitPolicy((0.25,)), [True, True, False, False]),
        (ExitPolicy((0.25,), "<"), [True, False, False, False]),
        (ExitPolicy((float(np.float32(0.3)),)), [True, True, True, False]),
        (ExitPolicy((0.3,)), [True, True, True, False]),  # 0.3 as float32, which the entropy is
        (ExitPolicy((-1.0,)), [False, False, False, False]),
        (ExitPolicy((1e300,)), [True, True, True, False]),
        (ExitPolicy((-1e300,)), [False, False, False, False]),
        (ExitPolicy((0.3,), rule="batch_max"), [False, False, False, False]),
    ],
    ids=["<=", "<", "float32", "decimal", "closed", "huge", "hugely negative", "batch max"],
)
def test_who_leaves(policy: ExitPolicy, expected: list[bool]) -> None:
    assert policy.leavers(0, ENTROPIES) == expected


def test_closed_never_lets_a_row_out() -> None:
    assert closed(3).thresholds == (-1.0, -1.0)
    assert not any(closed(3).leavers(1, ENTROPIES))
    assert closed(1).thresholds == ()


@pytest.mark.parametrize(
    ("asked", "exits", "expected"),
    [
        (0.5, 3, (0.5, 0.5)),
        (1, 2, (1.0,)),
        (np.float32(0.5), 3, (0.5, 0.5)),
        ([0.1, 2], 3, (0.1, 2.0)),
        ((), 1, ()),
        (0.5, 1, ()),
        ((float("inf"), -float("inf")), 3, (float("inf"), -float("inf"))),
    ],
)
def test_one_threshold_for_all_or_one_for_each(asked: Any, exits: int, expected: tuple[float, ...]) -> None:
    found = thresholds_for(asked, exits)
    assert found == expected
    assert all(type(value) is float for value in found)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([0.1], "thresholds: expected one number, or 2 (one for every exit but the last), got 1"),
        ([0.1, 0.2, 0.3], "thresholds: expected one number, or 2 (one for every exit but the last), got 3"),
        ([0.1, float("nan")], "thresholds: expected numbers in nats, got nan"),
        ([True, 0.1], "thresholds: expected numbers in nats, got True"),
        (["0.1", "0.2"], "thresholds: expected numbers in nats, got '0.1'"),
        (None, "thresholds: expected numbers in nats, got None"),
        ([10**400, 0.1], f"thresholds: expected numbers in nats, got 1{79 * '0'}"),
    ],
)
def test_refuses_thresholds(asked: Any, message: str) -> None:
    with pytest.raises(SelectionError) as error:
        thresholds_for(asked, 3)
    assert str(error.value) == message


def test_refuses_what_is_no_policy() -> None:
    with pytest.raises(
        SelectionError, match="expected a comparison of <, <= and a rule of per_row, batch_max, got '>'"
    ):
        ExitPolicy((0.1,), ">")
    with pytest.raises(SelectionError, match="got '<=' and 'mean'"):
        ExitPolicy((0.1,), rule="mean")
    with pytest.raises(SelectionError, match=r"got 1$"):
        check_count((0.1,), 3)


@given(entropy=st.floats(0, 3, width=32), compare=st.sampled_from(["<", "<="]))
def test_a_threshold_that_is_an_entropy_equals_it(entropy: float, compare: Any) -> None:
    assert ExitPolicy((entropy,), compare).leavers(0, [entropy]) == [compare == "<="]


COUNTS = st.integers(2, 6).flatmap(
    lambda exits: st.tuples(*[st.lists(st.integers(0, 300), min_size=exits, max_size=exits).filter(any)] * 2)
)


def monitor_of(*expected: int) -> ExitMonitor:
    return ExitMonitor(replace(policy(), histogram=expected))


def latest(monitor: ExitMonitor) -> Drift:
    found = monitor.latest()
    assert found is not None
    return found


@given(COUNTS)
def test_the_distance_is_the_kolmogorov_smirnov_statistic_of_the_rows(counts: tuple[list[int], list[int]]) -> None:
    expected, live = (np.repeat(np.arange(len(one)), one) for one in counts)
    drift = compare_exits(*counts)
    brute = max(abs((expected <= exit_).mean() - (live <= exit_).mean()) for exit_ in range(len(counts[0])))
    assert drift.distance == pytest.approx(brute, abs=1e-12)
    assert drift.rows == len(live)
    assert sum(drift.live) == pytest.approx(1)


def test_limit_at_a_known_size() -> None:
    drift = compare_exits([100, 0], [0, 400])
    # c(0.001) = 1.9495
    assert drift.limit == pytest.approx(1.9495 * math.sqrt(500 / 40_000), rel=1e-4)
    assert (drift.distance, drift.drifted) == (1.0, True)


def test_rows_like_the_calibrations_do_not_drift_and_others_do() -> None:
    rng = np.random.default_rng(0)
    drift = monitor_of(300, 250, 450)
    for _ in range(40):
        drift.add(rng.choice(3, 100, p=[0.3, 0.25, 0.45]))
    assert not latest(drift).drifted
    for _ in range(40):
        drift.add(rng.choice(3, 100, p=[0.1, 0.2, 0.7]))
    assert latest(drift).drifted


def test_few_rows_say_nothing() -> None:
    drift = monitor_of(5, 5)
    drift.add(np.zeros(LEAST_ROWS - 1, np.int64))
    assert drift.latest() is None
    drift.add(np.zeros(1, np.int64))
    found = latest(drift)
    assert (found.rows, found.expected, found.live) == (LEAST_ROWS, (0.5, 0.5), (1.0, 0.0))


def test_old_rows_are_forgotten() -> None:
    drift = monitor_of(500, 500)
    for _ in range(100):
        drift.add(np.tile([0, 1], BLOCK_ROWS // 2))
    for _ in range(2):
        drift.add(np.ones(BLOCK_ROWS, np.int64))
    assert (latest(drift).live, latest(drift).rows) == ((0.0, 1.0), 2 * BLOCK_ROWS)


def test_threads_lose_no_row() -> None:
    drift = monitor_of(1, 1)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: drift.add(np.array([0, 1])), range(800)))
    drift.add(np.array([0]))
    assert latest(drift).rows == 1601
