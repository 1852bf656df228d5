"""Whether rows leave where they left during calibration; if not, thresholds and promised costs no longer hold."""

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..inputs.arrays import Array
from .policy import CalibratedPolicy

# Significance level: with rows that still come from the calibration's distribution, one comparison in a thousand is
# called drift. Exits are few and discrete, for which the test is on the safe side: it warns less often than that.
ALPHA = 0.001
# Below this the limit is so wide that only a complete change would show.
LEAST_ROWS = 50
# Live rows are forgotten in blocks, so that a change shows after a million rows as it does after a thousand: what is
# compared are the last 4096 to 8192.
BLOCK_ROWS = 4096
# Rows gathered before they are compared, which takes as long as a small engine's run.
_ROWS_PER_COMPARISON = 64
_logger = logging.getLogger("nestforge")


@dataclass(frozen=True)
class Drift:
    """Live exits against expected ones: shares per exit (sum 1), over ``rows`` live rows.

    ``distance`` is the largest difference of the cumulative shares (0 to 1), ``limit`` what chance allows.
    """

    rows: int
    expected: tuple[float, ...]
    live: tuple[float, ...]
    distance: float
    limit: float

    @property
    def drifted(self) -> bool:
        """Whether the thresholds should be calibrated again, on data like today's."""
        return self.distance > self.limit


def compare_exits(expected_counts: Sequence[int] | Array, live_counts: Sequence[int] | Array) -> Drift:
    """Two-sample Kolmogorov-Smirnov test at ``ALPHA`` on rows counted by exit; neither count may be all zero.

    The limit is ``sqrt(-ln(ALPHA / 2) / 2) * sqrt((n + m) / (n m))`` for ``n`` expected and ``m`` live rows.
    """
    expected = np.asarray(expected_counts, np.float64)
    live = np.asarray(live_counts, np.float64)
    n, m = float(expected.sum()), float(live.sum())
    distance = float(np.abs(np.cumsum(expected) / n - np.cumsum(live) / m).max())
    limit = math.sqrt(-math.log(ALPHA / 2) / 2) * math.sqrt((n + m) / (n * m))
    return Drift(int(m), tuple((expected / n).tolist()), tuple((live / m).tolist()), distance, limit)


class ExitMonitor:
    """The live exits of one policy, compared with the calibration's. Thread-safe; logs a warning the first time that
    they drift."""

    def __init__(self, policy: CalibratedPolicy) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._gathered: list[Array] = []
        self._rows = 0
        self._block, self._last_block = np.zeros((2, len(policy.histogram)), np.int64)
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
        """The comparison with everything that was counted; None while that is less than ``LEAST_ROWS``."""
        with self._lock:
            if self._rows:
                self._compare()
            return self._latest

    def _compare(self) -> None:
        self._block = self._block + np.bincount(np.concatenate(self._gathered), minlength=len(self._block))
        self._gathered, self._rows = [], 0
        live = self._last_block + self._block
        if self._block.sum() >= BLOCK_ROWS:
            self._last_block, self._block = self._block, np.zeros_like(self._block)
        if live.sum() < LEAST_ROWS:
            return
        self._latest = compare_exits(self._policy.histogram, live)
        if self._latest.drifted and not self._warned:
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
