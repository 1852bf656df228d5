"""Counting the exits that answered, by calibrated policy, and saying once when they are not the calibration's."""

from __future__ import annotations

import logging
import threading

import numpy as np

from ..inputs.arrays import Array
from .calibration import CalibratedPolicy
from .drift import Drift, ExitDrift

# Rows gathered before they are compared, which takes as long as a small engine's run.
_ROWS_PER_COMPARISON = 64

_logger = logging.getLogger("nestforge")


class ExitMonitor:
    """The live exits of one policy. Thread-safe; logs a warning the first time that they drift."""

    def __init__(self, policy: CalibratedPolicy) -> None:
        self._policy = policy
        self._drift = ExitDrift(policy.histogram)
        self._lock = threading.Lock()
        self._gathered: list[Array] = []
        self._rows = 0
        self._latest: Drift | None = None
        self._warned = False

    def add(self, indices: Array) -> None:
        """Counts the exit (0-based) of each row: int64 ``[B]``."""
        with self._lock:
            self._gathered.append(indices.copy())  # the caller's, who may go on counting from 1
            self._rows += len(indices)
            if self._rows >= _ROWS_PER_COMPARISON:
                self._compare()

    def latest(self) -> Drift | None:
        """The comparison with everything that was counted; None while that is too little."""
        with self._lock:
            if self._rows:
                self._compare()
            return self._latest

    def _compare(self) -> None:
        self._latest = self._drift.add(np.concatenate(self._gathered)) or self._latest
        self._gathered, self._rows = [], 0
        if self._latest is not None and self._latest.drifted and not self._warned:
            self._warned = True
            _logger.warning(
                "exits %s of submodel %s: rows leave elsewhere than in the calibration (difference %.3f, by chance up "
                "to %.3f, %d rows); calibrate again on inputs like today's",
                self._policy.name,
                self._policy.submodel,
                self._latest.distance,
                self._latest.limit,
                self._latest.rows,
            )
