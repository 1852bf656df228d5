"""The requests that a model is answering now, and what a further one can expect among them.

A model keeps no queue: every request runs at once, on the thread that made it, and the runs share the cores. With
``parallel_runs`` runs at full speed at a time, each of ``n`` runs proceeds at ``min(1, parallel_runs / n)`` of it.
"""

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, TypeVar

from ..errors import SelectionError
from ..ownership import Owned, Owner

T = TypeVar("T")

# The stretch is a mean over so many runs beside others, each of which counts for at most so much.
_STRETCH_RUNS = 16
_MOST_STRETCH = 4.0
# Factors of the share that runs may take of their deadlines: for a request that was late, or refused for others, and
# for one that was in time, among others and alone. Some 4 % of misses keep it where it is.
_MISSED, _KEPT, _KEPT_ALONE = 0.8, 1.01, 1.05
_SMALLEST_SHARE = 0.02


@dataclass(frozen=True)
class LoadEstimate:
    """How long the requests in flight still take: ``remaining_ms`` of each alone, rising; 0 for one that has already
    run for longer than expected. ``parallel_runs`` is how many proceed at full speed at a time. ``left_ms`` is the time
    to the deadline of each, infinite where it has none; beside others a run takes ``stretch`` times what it should. A
    run should take at most ``share`` of its deadline alone, for others to keep theirs."""

    remaining_ms: Sequence[float]
    parallel_runs: float
    left_ms: Sequence[float] = ()
    stretch: float = 1.0
    share: float = 1.0

    def finish_ms(self, own_ms: float) -> float:
        """When a run that takes ``own_ms`` alone ends if it begins now and nothing else comes."""
        passed = done = 0.0
        own_ms *= self.stretch if self.remaining_ms else 1.0
        for remaining, slower in self._stages():
            if remaining >= own_ms:
                return passed + (own_ms - done) * slower
            passed, done = passed + (remaining - done) * slower, remaining
        return passed + (own_ms - done) * self._slower(1)

    def room_ms(self, within_ms: float) -> float:
        """The longest run, by what it takes alone, that ends within ``within_ms`` if it begins now, and beside which
        those in flight keep the deadlines that they would keep without it."""
        if not self.remaining_ms:
            return within_ms / self._slower(1)
        beside = [self._room_beside(place, left) for place, left in enumerate(self.left_ms)]
        return min([self._room(within_ms), *beside]) / self.stretch

    def _room(self, within_ms: float) -> float:
        """The longest run that itself ends within ``within_ms``."""
        passed = done = 0.0
        for remaining, slower in self._stages():
            ends = passed + (remaining - done) * slower
            if ends >= within_ms:
                return done + (within_ms - passed) / slower
            passed, done = ends, remaining
        return done + (within_ms - passed) / self._slower(1)

    def _room_beside(self, place: int, left_ms: float) -> float:
        """The longest run beside which the one at ``place`` ends within ``left_ms``; infinite where it does beside any,
        or beside none."""
        count, done, stages = len(self.remaining_ms), 0.0, []
        for number, remaining in enumerate(self.remaining_ms[: place + 1]):
            stages.append((remaining - done, self._slower(count - number), self._slower(count + 1 - number)))
            done = remaining
        slack = left_ms - sum(own * slower for own, slower, _ in stages)
        if slack < 0 or not math.isfinite(left_ms):
            return math.inf
        done = 0.0
        for own, slower, slowest in stages:
            costs = own * (slowest - slower)
            if costs > slack:
                return done + slack / (slowest - slower)
            slack, done = slack - costs, done + own
        return math.inf

    def _stages(self) -> Sequence[tuple[float, float]]:
        """Until which own time of a new run each request stays beside it, and how many times slower all are then."""
        count = len(self.remaining_ms) + 1
        return [(remaining, self._slower(count - i)) for i, remaining in enumerate(self.remaining_ms)]

    def _slower(self, runs: int) -> float:
        return max(1.0, runs / self.parallel_runs)

    def __str__(self) -> str:
        count = len(self.remaining_ms)
        if not count:
            return "nothing in flight"
        need = sum(self.remaining_ms)
        shown = f"{need:.3g} ms" if math.isfinite(need) else "unknown time"
        return f"{count} in flight that need{'s' if count == 1 else ''} {shown} more"


class _Entry(NamedTuple):
    """A request: its number, the progress at which it began, what it is expected to take alone, and when it is due
    (seconds of the clock)."""

    number: int
    begin_ms: float
    expected_ms: float
    due: float


class InFlight:
    """The requests in flight; ``parallel_runs`` is how many proceed at full speed at a time. Thread-safe.

    Each has an owner of its own, so that one whose call was interrupted is in flight no more.
    """

    def __init__(self, parallel_runs: float, clock: Callable[[], float] = perf_counter) -> None:
        self._parallel_runs = parallel_runs
        self._clock = clock
        self._lock = threading.Lock()
        # How far every request now in flight has come, had it begun at 0: all of them proceed alike.
        self._progress_ms = 0.0
        self._at = clock()
        self._entries = Owned[_Entry]()
        self._log_stretch = 0.0
        self._share = 1.0
        self._next = 0
        # The last request that had to share the cores with another; those in flight at that time have lower numbers.
        self._last_sharing = -1

    def enter(self, request: Owner, expected_ms: float) -> None:
        """Enters a request that takes ``expected_ms`` alone, until it is over, or leaves."""
        with self._lock:
            self._enter(request, expected_ms, math.inf, self._advance())

    def admit(self, request: Owner, due: float, choose: Callable[[LoadEstimate], tuple[T, float]]) -> T:
        """Enters the request that ``choose`` makes of what is in flight, by what it takes alone, in milliseconds, and
        which is ``due`` then (seconds of the clock).

        No other request enters between the look and the entry, so that two cannot take the same room.
        """
        with self._lock:
            entries = self._advance()
            chosen, expected_ms = self._chosen(choose, entries)
            self._enter(request, expected_ms, due, entries)
            return chosen

    def leave(self, request: Owner, counts: bool = True) -> bool:
        """The request is answered. Whether it ran at full speed all the time, as far as this model's other requests
        go; if not, what it took is learnt from where it ``counts``: not of first runs, or of chains of exits."""
        with self._lock:
            self._advance()
            (entry,) = self._entries.of(request)
            self._entries.remove(request)
            is_alone = entry.number > self._last_sharing
            if counts and not is_alone and 0.0 < entry.expected_ms < math.inf:
                self._learn((self._progress_ms - entry.begin_ms) / entry.expected_ms)
            if entry.due < math.inf:
                self._weigh(_MISSED if self._at > entry.due else _KEPT_ALONE if is_alone else _KEPT)
            return is_alone

    def load(self) -> LoadEstimate:
        """Estimated load of the requests in flight now."""
        with self._lock:
            return self._estimate(self._advance())

    def _learn(self, ratio: float) -> None:
        """Counts a run beside others that took ``ratio`` of what it should have, among them."""
        self._log_stretch += (math.log(min(max(ratio, 1.0), _MOST_STRETCH)) - self._log_stretch) / _STRETCH_RUNS

    def _chosen(self, choose: Callable[[LoadEstimate], tuple[T, float]], entries: Sequence[_Entry]) -> tuple[T, float]:
        try:
            return choose(self._estimate(entries))
        except SelectionError:
            if entries and self._fits_alone(choose):
                self._weigh(_MISSED)
            raise

    def _fits_alone(self, choose: Callable[[LoadEstimate], object]) -> bool:
        with suppress(SelectionError):
            choose(LoadEstimate([], self._parallel_runs))
            return True
        return False

    def _weigh(self, change: float) -> None:
        self._share = min(1.0, max(_SMALLEST_SHARE, self._share * change))

    def _estimate(self, entries: Sequence[_Entry]) -> LoadEstimate:
        stretch = math.exp(self._log_stretch)
        found = sorted(
            (max(0.0, one.begin_ms + one.expected_ms * stretch - self._progress_ms), 1e3 * (one.due - self._at))
            for one in entries
        )
        remaining, left = [one for one, _ in found], [left for _, left in found]
        return LoadEstimate(remaining, self._parallel_runs, left, stretch, self._share)

    def _enter(self, request: Owner, expected_ms: float, due: float, entries: Sequence[_Entry]) -> None:
        number, self._next = self._next, self._next + 1
        if len(entries) + 1 > self._parallel_runs:
            self._last_sharing = number
        self._entries.add(request, _Entry(number, self._progress_ms, expected_ms, due))

    def _advance(self) -> list[_Entry]:
        """Follows the progress until now, and returns what is in flight."""
        now, entries, progress = self._clock(), self._entries.present(), 0.0
        if entries:
            progress = self._progress_ms + 1e3 * (now - self._at) * min(1.0, self._parallel_runs / len(entries))
        self._at, self._progress_ms = now, progress
        return entries
