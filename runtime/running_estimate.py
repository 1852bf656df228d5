"""Times of engines while a model answers: figures made elsewhere, or in bad minutes, correct themselves.

A run gives the ratio of its time over the figure that the bundle states for it. Its logarithm is followed as the sum of
three running means: of the bundle (this host is slower, or busy), of the engine, and of the engine at sizes like the
run's. So what one engine showed is carried over to engines that have not run yet, and refined once they do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import copysign, exp, log
from time import perf_counter

from ..bucket import Bucket

# Runs of an engine at sizes like one: the first after it was opened finds neither memory nor caches ready.
_UNCOUNTED_RUNS = 1
# From how many counted runs on the estimate is used, and an odd run is taken for less than it says.
_ENOUGH_RUNS = 3
# How many runs a mean is of: a further one then counts as the last of so many, so that old ones are forgotten. What
# changes is the host more often than one engine on it.
_BUNDLE_RUNS = 4
_OWN_RUNS = 16
# The most that a run is taken to be off by, as a logarithm: runs beside a busy program take several times as long, and
# what counts is what most runs take.
_LARGEST_ERROR = log(1.25)
# Within this of the stated figure that one stands, and choices are made anew only for as much of a change: logarithms.
_SMALLEST_RATIO = 0.1
_SMALLEST_CHANGE = 0.05
# For how long an estimate is a reason to refuse without another try: a host that was busy may be so no more.
_SECONDS_FRESH = 1.0


class _Mean:
    """A running mean of logarithms over ``runs`` runs, ``most`` of them in the end."""

    __slots__ = ("most", "runs", "value")

    def __init__(self, most: int) -> None:
        self.value, self.runs, self.most = 0.0, 0, most


class SizeEstimate:
    """Time of one engine at sizes like one, over what the bundle states. Thread-safe."""

    __slots__ = ("_all", "_bundle", "_engine", "_lock", "_published", "_size", "_uncounted", "ran_at")

    def __init__(self, all_: RunningEstimate, bundle: _Mean, engine: _Mean, lock: threading.Lock) -> None:
        self._all, self._bundle, self._engine, self._size, self._lock = all_, bundle, engine, _Mean(_OWN_RUNS), lock
        self._uncounted = _UNCOUNTED_RUNS
        self._published = 0.0
        # When it was last added to (``perf_counter``, seconds).
        self.ran_at = -_SECONDS_FRESH

    @property
    def ratio(self) -> float:
        """Time of a run over the stated figure, exactly 1 where that figure stands."""
        total = self._bundle.value + self._engine.value + self._size.value
        return 1.0 if self._bundle.runs < _ENOUGH_RUNS or abs(total) <= _SMALLEST_RATIO else exp(total)

    @property
    def is_seen(self) -> bool:
        """Whether runs of this engine itself were counted, so that more than those of others speaks for it."""
        return self._engine.runs > 0

    @property
    def is_new(self) -> bool:
        """Whether the next run is not counted."""
        return self._uncounted > 0

    @property
    def is_fresh(self) -> bool:
        """Whether runs at sizes like this were counted, lately and often enough to refuse by."""
        return self._size.runs >= _ENOUGH_RUNS and perf_counter() - self.ran_at < _SECONDS_FRESH

    def add(self, stated_ms: float, run_ms: float, ended: float) -> None:
        """Counts a run of ``run_ms`` that ended at ``ended``, for which the bundle states ``stated_ms``.

        Only of runs that had the processor to themselves, as far as this model knows.
        """
        with self._lock:
            self.ran_at = ended
            if self._uncounted:
                self._uncounted -= 1
                return
            bundle, engine, size = self._bundle, self._engine, self._size
            total = bundle.value + engine.value + size.value
            error = log(run_ms / stated_ms) - total
            if not -_LARGEST_ERROR <= error <= _LARGEST_ERROR and bundle.runs >= _ENOUGH_RUNS:
                error = copysign(_LARGEST_ERROR, error)
            left = error
            for mean in (bundle, engine, size):  # each takes its share of what the one before leaves
                if mean.runs < mean.most:
                    mean.runs += 1
                step = left / mean.runs
                mean.value += step
                left -= step
            total += error - left
            # Where it begins to be used, or ends, the figure jumps.
            stands = (abs(total) <= _SMALLEST_RATIO) == (abs(self._published) <= _SMALLEST_RATIO)
            little = stands and -_SMALLEST_CHANGE <= total - self._published <= _SMALLEST_CHANGE
            if bundle.runs < _ENOUGH_RUNS or little:
                return
            self._published = total
        self._all.changed()


class RunningEstimate:
    """The estimates of all engines of one bundle; ``changed`` is called when choices are to be made anew."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.changed = changed
        self._lock = threading.Lock()
        self._bundle = _Mean(_BUNDLE_RUNS)
        self._engines: dict[str, _Mean] = {}
        self._sizes: dict[tuple[str, int, int], SizeEstimate] = {}

    def of(self, engine: str, shape: Bucket) -> SizeEstimate:
        """The estimate of ``engine`` (its id) at sizes like ``shape``: between the same powers of two."""
        key = (engine, shape.batch.bit_length(), shape.sequence.bit_length())
        with self._lock:
            if key not in self._sizes:
                mean = self._engines.setdefault(engine, _Mean(_OWN_RUNS))
                self._sizes[key] = SizeEstimate(self, self._bundle, mean, self._lock)
            return self._sizes[key]
