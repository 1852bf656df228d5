"""Which exits are open for a request, and why: what was requested, else calibrated, else the model's own gate; and
whether rows leave calibrated exits as they did when those were calibrated."""

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.engine_entry import ExitsEntry
from ...bundle.manifest import CALIBRATION_NAME
from ...bundle.open_bundle import Bundle
from ...errors import SelectionError
from ..engines.latencies import host_latencies
from ..engines.runner import EnginePool
from ..inputs.arrays import Array
from .chain import ChainRun, ExitChain, Stop
from .policy import CalibratedPolicy, Calibration, ExitPolicy, thresholds_for

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


# A policy, one threshold for every exit or one for each, the name of a calibrated policy, or "off".
RequestedExits = ExitPolicy | float | Sequence[float] | str
OFF = "off"

_MAX_REMEMBERED_CHOICES = 1024


@dataclass(frozen=True)
class OpenExits:
    """A chain, the policy that it follows, and what counts its exits if the policy was calibrated."""

    chain: ExitChain
    policy: ExitPolicy
    monitor: ExitMonitor | None = None

    def answer(self, feeds: Mapping[str, Array], shape: Bucket, first: int = 0, stop: Stop | None = None) -> ChainRun:
        """See ExitChain.answer; rows that leave are counted."""
        run = self.chain.answer(feeds, shape, self.policy, first=first, stop=stop)
        if self.monitor is not None:
            self.monitor.add(run.index if run.rest is None else np.delete(run.index, run.rest.rows))
        return run


@dataclass(frozen=True)
class ExitChoice:
    """The exits that rows may leave at, or None where the whole engine answers; ``reason`` ends the answer's."""

    reason: str
    open: OpenExits | None = None


class ExitChooser:
    """Chooses for the submodels of one bundle; exits are open where all of a submodel's segments may be used.

    Raises a BundleError if the bundle's calibration cannot be read. Thread-safe.
    """

    def __init__(self, bundle: Bundle, exits: ExitsEntry, pool: EnginePool) -> None:
        self._bundle = bundle
        self._gate = exits.gate
        self._pool = pool
        # A figure predicted or measured of a processor says nothing of a GPU.
        self._latencies = () if pool.on_gpu else host_latencies(bundle, pool.threads).of_chains
        self._calibration = Calibration.read(bundle)
        policies = self._calibration.policies if self._calibration else ()
        self._monitors = {(policy.submodel, policy.name): ExitMonitor(policy) for policy in policies}
        self._lock = threading.Lock()
        self._chains: dict[str, ExitChain | SelectionError] = {}
        self._remembered: dict[tuple[object, ...], ExitChoice] = {}

    def choose(self, requested: RequestedExits | None, submodel: str, limited: bool) -> ExitChoice:
        """For a request to ``submodel`` (its id). With a latency limit (``limited``) the whole engine answers unless
        exits are requested: a row that passes every exit takes longer.

        Raises SelectionError where what is requested is none, or cannot be had here.
        """
        if isinstance(requested, np.ndarray):
            requested = requested.item() if requested.ndim == 0 else tuple(requested)
        elif isinstance(requested, list):
            requested = tuple(requested)
        # By type as well: True equals 1, but is no threshold.
        key = (requested, type(requested), submodel, limited)
        try:
            choice = self._remembered.get(key)
        except TypeError:
            raise _unknown(requested) from None
        if choice is None:
            choice = self._default(submodel, limited) if requested is None else self._requested(requested, submodel)
            if len(self._remembered) >= _MAX_REMEMBERED_CHOICES:
                self._remembered.clear()
            self._remembered[key] = choice
        return choice

    def drift(self) -> Mapping[str, Drift]:
        """How the live exits compare with the calibration's, by policy; of policies that have answered enough rows.

        Policies of one name are listed as ``NAME of SUBMODEL``.
        """
        names = [name for _, name in self._monitors]
        found = {}
        for (submodel, name), monitor in self._monitors.items():
            latest = monitor.latest()
            if latest is not None:
                found[name if names.count(name) == 1 else f"{name} of {submodel}"] = latest
        return found

    def close(self) -> None:
        """Lets go of the engines that chains hold; the pool has been closed."""
        with self._lock:
            for chain in self._chains.values():
                if isinstance(chain, ExitChain):
                    chain.release()

    def _default(self, submodel: str, limited: bool) -> ExitChoice:
        calibrated = self._calibration.default(submodel) if self._calibration else None
        if calibrated is None and self._gate is None:
            return ExitChoice("whole engine: no calibrated exits")
        if limited:
            return ExitChoice("whole engine: exits speed up the mean, the limit is for every request")
        try:
            chain = self._chain(submodel)
        except SelectionError as problem:
            return ExitChoice(f"whole engine: {problem}")
        if calibrated is not None:
            return self._calibrated(chain, calibrated, "the default")
        assert self._gate is not None
        thresholds = self._gate.thresholds[: chain.exits - 1]
        policy = ExitPolicy(thresholds, self._gate.compare, name="the model's own gate")
        return ExitChoice(f"exits: {policy.name}", OpenExits(chain, policy))

    def _requested(self, requested: RequestedExits, submodel: str) -> ExitChoice:
        if isinstance(requested, str) and requested == OFF:
            return ExitChoice("whole engine: exits off")
        chain = self._chain(submodel)
        if isinstance(requested, str):
            if self._calibration is None:
                raise SelectionError(
                    f"exits {requested[:80]!r}: bundle {self._bundle.path} has no {CALIBRATION_NAME}; "
                    "run `nestforge calibrate`, or ask for thresholds"
                )
            return self._calibrated(chain, self._calibration.find(submodel, requested), "requested")
        if isinstance(requested, ExitPolicy):
            policy = requested
        elif isinstance(requested, (Real, tuple)):
            compare = self._gate.compare if self._gate else "<="
            policy = ExitPolicy(thresholds_for(requested, chain.exits), compare)
        else:
            raise _unknown(requested)
        return ExitChoice(f"exits: {policy.name}", OpenExits(chain, policy))

    def _calibrated(self, chain: ExitChain, calibrated: CalibratedPolicy, why: str) -> ExitChoice:
        if all(threshold < 0 for threshold in calibrated.thresholds):  # the same answers without the chain's overhead
            return ExitChoice(f"whole engine: calibrated {calibrated.name} for {calibrated.budget} closes every exit")
        monitor = self._monitors[calibrated.submodel, calibrated.name]
        reason = f"exits: calibrated {calibrated.name} for {calibrated.budget}, {why}"
        return ExitChoice(reason, OpenExits(chain, calibrated.policy(), monitor))

    def _chain(self, submodel: str) -> ExitChain:
        with self._lock:
            chain = self._chains.get(submodel)
            if chain is None:
                try:
                    chain = ExitChain(self._bundle, submodel, self._pool, self._latencies, self._pool.residencies)
                except SelectionError as problem:
                    chain = problem
                self._chains[submodel] = chain
        if isinstance(chain, SelectionError):
            raise SelectionError(str(chain))
        return chain


def _unknown(requested: object) -> SelectionError:
    return SelectionError(
        f"exits: expected thresholds in nats, a calibrated policy's name, an ExitPolicy or 'off', got {requested!r:.80}"
    )
