"""The engines of a bundle with what they take at one size, and how that is known: stated, or seen while running."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..bucket import Bucket
from .bundle.build_record import Latency
from .bundle.entries.engine_entry import EngineEntry
from .engines.contract.residency import Residency
from .engines.latency_at import RunTime, latency_at
from .running_estimate import RunningEstimate, SizeEstimate

_MAX_LISTED_ENGINES = 8
# A file may state less, over which a run's time is no number.
_LEAST_MS = 1e-6


@dataclass(frozen=True)
class Choice:
    """The engine that answers, and why, with its figures. ``stated_ms`` is what the bundle states that its run takes
    alone, infinite where it states nothing; ``estimate`` corrects it."""

    engine: EngineEntry
    reason: str
    stated_ms: float
    estimate: SizeEstimate

    @property
    def latency_ms(self) -> float:
        """What its run takes alone, as is known by now."""
        return self.stated_ms * self.estimate.ratio

    def ran(self, run_ms: float, ended: float) -> None:
        """Counts a run of this choice that ended at ``ended`` (``perf_counter``, seconds)."""
        if _LEAST_MS <= self.stated_ms < math.inf and run_ms > 0.0:
            self.estimate.add(self.stated_ms, run_ms, ended)


@dataclass(frozen=True)
class Candidate:
    """One engine with its figures at one size; ``latency_ms``, the median, is infinite where the bundle states none.
    ``is_noisy``: they rest on a noisy measurement, and no run has shown better."""

    engine: EngineEntry
    latency_ms: float
    latency: str
    memory_mb: float
    p95_ms: float
    stated_ms: float
    estimate: SizeEstimate
    is_noisy: bool

    def choice(self, reason: str) -> Choice:
        return Choice(self.engine, reason, self.stated_ms, self.estimate)

    def compared(self, limits: Mapping[str, float]) -> tuple[bool, str]:
        """Whether it keeps ``limits`` by name, and its figures beside them."""
        parts = []
        fits = True
        if "latency_ms" in limits:
            fits = self.latency_ms <= limits["latency_ms"]
            parts.append(f"{self.latency} <= {limits['latency_ms']:g} ms")
        if "memory_mb" in limits:
            fits = fits and self.memory_mb <= limits["memory_mb"]
            parts.append(f"{self.memory_mb:.1f} MB <= {limits['memory_mb']:g} MB")
        return fits, ", ".join(parts)

    def __str__(self) -> str:
        return f"{self.engine.submodel} ({self.latency}, {self.memory_mb:.1f} MB)"


@dataclass(frozen=True)
class Engine:
    """One engine, what it is stated to take at a shape, and how that is known, and its memory."""

    entry: EngineEntry
    stated: Callable[[Bucket], tuple[RunTime, str]]
    memory_mb: float
    running: RunningEstimate

    def candidate(self, shape: Bucket) -> Candidate:
        """Its figures for an input of ``shape``: the stated ones, unless what was seen while running differs."""
        run_at = self.entry.bucket.filled(shape)
        time, known = self.stated(run_at)
        estimate = self.running.of(self.entry.id, run_at)
        ratio = estimate.ratio
        is_noisy = time.is_noisy and not (estimate.is_seen and ratio != 1.0)
        if ratio != 1.0 and time.p50_ms < math.inf:
            source = "seen while running" if estimate.is_seen else "by what else ran here"
            known = f"{known}, {source}: {time.p50_ms * ratio:.3g} ms"
        median, slow = time.p50_ms * ratio, time.p95_ms * ratio
        return Candidate(self.entry, median, known, self.memory_mb, slow, time.p50_ms, estimate, is_noisy)

    def longest_sequence(self, batch: int, limits: Mapping[str, float]) -> int:
        """The longest sequence of ``batch`` rows that it answers within ``limits``; 0 where it answers none. What a run
        takes rises with its length."""
        bucket = self.entry.bucket
        if not limits:
            return bucket.sequence
        sequences = range(bucket.smallest.sequence, bucket.sequence + 1)
        kept = bisect(
            sequences, False, key=lambda length: not self.candidate(Bucket(batch, length)).compared(limits)[0]
        )
        return sequences[kept - 1] if kept else 0


def stated_latency(
    mine: Sequence[Latency], residency: Residency, elsewhere: str | None
) -> Callable[[Bucket], tuple[RunTime, str]]:
    """What one engine is stated to take at a shape, and how that is known."""
    if not mine:
        return lambda _: (RunTime(math.inf, math.inf, False), "no latency known")
    best = min(mine, key=lambda one: (one.measured_p50_ms is None, one.residency != residency))
    milliseconds = latency_at(best)
    place = "here" if elsewhere is None else f"on {elsewhere}:"
    residence = f" as {best.residency}" if best.residency not in (None, residency) else ""

    def at(shape: Bucket) -> tuple[RunTime, str]:
        time = milliseconds(shape)
        if not time.measured:
            return time, f"predicted {time.p50_ms:.3g} ms"
        noisy = ", noisy" if time.is_noisy else ""
        return time, f"measured {place} {time.p50_ms:.3g} ms{residence}{noisy}"

    return at


def by_padding(engines: Sequence[Engine], shape: Bucket) -> list[Engine]:
    """Those of ``engines``, smallest bucket first, that hold ``shape``, the one that pads it least first."""
    holding = [engine for engine in engines if engine.entry.bucket.holds(shape)]
    return sorted(holding, key=lambda engine: engine.entry.bucket.filled(shape).tokens)


def next_larger(candidates: Sequence[Candidate], chosen: Candidate) -> Candidate | None:
    """The preferred engine of the submodel before that of ``chosen``."""
    first: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.engine.submodel == chosen.engine.submodel:
            break
        first.setdefault(candidate.engine.submodel, candidate)
    return next(reversed(first.values()), None)


def listing(candidates: Sequence[Candidate]) -> str:
    """The first of ``candidates`` and the last, in one line."""
    more = f" and {len(candidates) - _MAX_LISTED_ENGINES} more" if len(candidates) > _MAX_LISTED_ENGINES else ""
    shown = [*candidates[: _MAX_LISTED_ENGINES - 1], candidates[-1]] if more else candidates
    return ", ".join(map(str, shown)) + more + noise_hint(candidates)


def noise_hint(candidates: Sequence[Candidate]) -> str:
    """What to do about noisy figures, where some of ``candidates`` have them."""
    noisy = any(candidate.is_noisy for candidate in candidates)
    return "; noisy figures are not to be trusted: `nestforge measure BUNDLE` measures again" if noisy else ""
