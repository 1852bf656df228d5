"""The requests that a model is answering now, and what a further one can expect among them.

A model keeps no queue: every request runs at once, on the thread that made it, and the runs share the cores. With
``parallel_runs`` runs at full speed at a time, each of ``n`` runs proceeds at ``min(1, parallel_runs / n)`` of it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, TypeVar

from ..ownership import Owned, Owner

T = TypeVar("T")


@dataclass(frozen=True)
class LoadEstimate:
    """How long the requests in flight still take: ``remaining_ms`` of each alone, rising; 0 for one that has already
    run for longer than expected. ``parallel_runs`` is how many proceed at full speed at a time."""

    remaining_ms: Sequence[float]
    parallel_runs: float

    def finish_ms(self, own_ms: float) -> float:
        """When a run that takes ``own_ms`` alone ends if it begins now and nothing else comes."""
        passed = done = 0.0
        for remaining, slower in self._stages():
            if remaining >= own_ms:
                return passed + (own_ms - done) * slower
            passed, done = passed + (remaining - done) * slower, remaining
        return passed + (own_ms - done) * self._slower(1)

    def room_ms(self, within_ms: float) -> float:
        """The longest run, by what it takes alone, that ends within ``within_ms`` if it begins now."""
        passed = done = 0.0
        for remaining, slower in self._stages():
            ends = passed + (remaining - done) * slower
            if ends >= within_ms:
                return done + (within_ms - passed) / slower
            passed, done = ends, remaining
        return done + (within_ms - passed) / self._slower(1)

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
    """A request: its number, and the progress at which it has taken what was expected."""

    number: int
    end_ms: float


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
        self._next = 0
        # The last request that had to share the cores with another; those in flight at that time have lower numbers.
        self._last_sharing = -1

    def enter(self, request: Owner, expected_ms: float) -> None:
        """Enters a request that takes ``expected_ms`` alone, until it is over, or leaves."""
        with self._lock:
            self._enter(request, expected_ms, self._advance())

    def admit(self, request: Owner, choose: Callable[[LoadEstimate], tuple[T, float]]) -> T:
        """Enters the request that ``choose`` makes of what is in flight, by what it takes alone, in milliseconds.

        No other request enters between the look and the entry, so that two cannot take the same room.
        """
        with self._lock:
            entries = self._advance()
            chosen, expected_ms = choose(self._estimate(entries))
            self._enter(request, expected_ms, entries)
            return chosen

    def leave(self, request: Owner) -> bool:
        """The request is answered. Whether it ran at full speed all the time, as far as this model's other requests
        go."""
        with self._lock:
            self._advance()
            (entry,) = self._entries.of(request)
            self._entries.remove(request)
            return entry.number > self._last_sharing

    def load(self) -> LoadEstimate:
        """What is in flight now."""
        with self._lock:
            return self._estimate(self._advance())

    def _estimate(self, entries: Sequence[_Entry]) -> LoadEstimate:
        remaining = sorted(max(0.0, entry.end_ms - self._progress_ms) for entry in entries)
        return LoadEstimate(remaining, self._parallel_runs)

    def _enter(self, request: Owner, expected_ms: float, entries: Sequence[_Entry]) -> None:
        number, self._next = self._next, self._next + 1
        if len(entries) + 1 > self._parallel_runs:
            self._last_sharing = number
        self._entries.add(request, _Entry(number, self._progress_ms + expected_ms))

    def _advance(self) -> list[_Entry]:
        """What is in flight, and has come as far as it is now."""
        now, entries, progress = self._clock(), self._entries.present(), 0.0
        if entries:
            progress = self._progress_ms + 1e3 * (now - self._at) * min(1.0, self._parallel_runs / len(entries))
        self._at, self._progress_ms = now, progress
        return entries
