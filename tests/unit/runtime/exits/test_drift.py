from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.runtime.exits.drift import BLOCK_ROWS, LEAST_ROWS, Drift, ExitMonitor, compare_exits
from support.exit_bundles import policy

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
