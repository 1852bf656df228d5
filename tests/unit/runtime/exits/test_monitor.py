from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from nestforge.runtime.exits.calibration import CalibratedPolicy
from nestforge.runtime.exits.monitor import ExitMonitor
from support.exit_policies import policy


@pytest.fixture
def half_at_each() -> CalibratedPolicy:
    return replace(policy(submodel="depth2"), histogram=(100, 100))


def test_nothing_is_said_of_a_few_rows(half_at_each: CalibratedPolicy) -> None:
    monitor = ExitMonitor(half_at_each)
    monitor.add(np.array([0, 1] * 10))
    assert monitor.latest() is None


def test_rows_count_as_they_were_when_they_were_added(half_at_each: CalibratedPolicy) -> None:
    monitor = ExitMonitor(half_at_each)
    rows = np.array([0, 1] * 30)
    monitor.add(rows)
    rows[:] = 1
    latest = monitor.latest()
    assert latest is not None
    assert (latest.rows, latest.distance, latest.drifted) == (60, 0.0, False)


def test_a_drift_is_a_warning_once(half_at_each: CalibratedPolicy, caplog: pytest.LogCaptureFixture) -> None:
    monitor = ExitMonitor(half_at_each)
    with caplog.at_level(logging.WARNING, "nestforge"):
        for _ in range(3):
            monitor.add(np.ones(100, np.int64))
    (record,) = caplog.records
    assert "rows leave elsewhere than in the calibration (difference 0.500" in record.getMessage()
