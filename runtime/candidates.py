"""Engines with what they take at one size, by figures and by their own runs; and what several runs take, the one way in
which more rows than an engine takes at once are answered."""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..bucket import Bucket
from ..bundle.build_record import Latency
from ..bundle.entries.engine_entry import EngineEntry
from ..errors import InputError
from .engines.latencies import RunTime, latency_at
from .engines.residency import Residency
from .inputs.arrays import Array
from .running_estimate import RunningEstimate, SizeEstimate

_MAX_LISTED_ENGINES = 8
# Shapes whose stated times an engine remembers.
_MOST_SHAPES = 1024
# A file may state less, over which a run's time is no number.
_LEAST_MS = 1e-6


@dataclass(frozen=True)
class Choice:
    """The engine that answers, and why, with its figures. ``stated_ms`` is what the bundle states that its run takes
    alone, infinite where it states nothing; ``estimate`` corrects it.

    ``runs`` is empty where one run answers. Where no engine takes all rows at once it has the numbers of the rows of
    each run, and the choice for it, all of one submodel; ``engine`` is then that of the first run, and the figures are
    of all together.
    """

    engine: EngineEntry
    reason: str
    stated_ms: float
    estimate: SizeEstimate
    runs: tuple[tuple[Array, Choice], ...] = ()

    @property
    def latency_ms(self) -> float:
        """The time that its run, or all of them, takes alone, as is known by now."""
        if self.runs:
            return sum(one.latency_ms for _, one in self.runs)
        return self.stated_ms * self.estimate.ratio

    @property
    def is_new(self) -> bool:
        """Whether a run of it would be the first of its engine at such a size."""
        return any(one.is_new for _, one in self.runs) if self.runs else self.estimate.is_new

    def ran(self, run_ms: float, ended: float) -> None:
        """Counts a run of this choice, or of one of its ``runs``, that ended at ``ended`` (``perf_counter``,
        seconds)."""
        if _LEAST_MS <= self.stated_ms < math.inf and run_ms > 0.0:
            self.estimate.add(self.stated_ms, run_ms, ended)


@dataclass(frozen=True)
class Candidate:
    """One engine with its figures at one size; ``latency_ms``, the median, is infinite where the bundle states none.
    ``is_noisy``: they rest on a noisy measurement, and no run has shown better. With ``runs`` the figures are of all
    of them, memory and ``estimate`` those of the run that needs the most time. A run takes ``cores``."""

    engine: EngineEntry
    latency_ms: float
    latency: str
    memory_mb: float
    p95_ms: float
    stated_ms: float
    estimate: SizeEstimate
    is_noisy: bool
    runs: Runs | None = None
    cores: int = 1

    def choice(self, reason: str) -> Choice:
        if self.runs is None:
            return Choice(self.engine, reason, self.stated_ms, self.estimate)
        runs = tuple((rows, self.runs.by_shape[shape].choice("")) for rows, shape in self.runs.split.parts)
        count = sum(len(rows) for rows, _ in runs)
        several = f"{reason}; {count} rows in {len(runs)} runs, since no engine takes them at once"
        return Choice(runs[0][1].engine, several, self.stated_ms, self.estimate, runs)

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
class Runs:
    """How one submodel answers more rows than any of its engines takes at once, and its engine for each shape."""

    split: Split
    by_shape: Mapping[Bucket, Candidate]


@dataclass(frozen=True)
class Engine:
    """One engine, what it is stated to take at a shape, and how that is known, its memory, and its threads."""

    entry: EngineEntry
    stated: Callable[[Bucket], tuple[RunTime, str]]
    memory_mb: float
    running: RunningEstimate
    threads: int = 1

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
        cores = self.threads
        return Candidate(self.entry, median, known, self.memory_mb, slow, time.p50_ms, estimate, is_noisy, cores=cores)

    def longest_sequence(self, batch: int, limits: Mapping[str, float]) -> int:
        """The longest sequence of ``batch`` rows that it answers within ``limits``; 0 where it answers none. The time
        of a run rises with its length."""
        bucket = self.entry.bucket
        if not limits:
            return bucket.sequence
        sequences = range(bucket.smallest.sequence, bucket.sequence + 1)
        full, rest = divmod(batch, bucket.batch)

        def is_beyond(length: int) -> bool:
            if batch <= bucket.batch:
                one = self.candidate(Bucket(batch, length))
            else:
                counts = {Bucket(bucket.batch, length): full, Bucket(rest, length): 1}
                one = in_runs([self], Split((), {shape: n for shape, n in counts.items() if shape.batch}))
            return not one.compared(limits)[0]

        kept = bisect(sequences, False, key=is_beyond)
        return sequences[kept - 1] if kept else 0


def stated_latency(
    mine: Sequence[Latency], residency: Residency, elsewhere: str | None
) -> Callable[[Bucket], tuple[RunTime, str]]:
    """Stated time of one engine at a shape, and its source."""
    if not mine:
        return lambda _: (RunTime(math.inf, math.inf, False), "no latency known")
    best = min(mine, key=lambda one: (not one.is_measured, one.residency != residency))
    milliseconds = latency_at(best)
    place = "here" if elsewhere is None else f"on {elsewhere}:"
    residence = f" as {best.residency}" if best.residency not in (None, residency) else ""

    @lru_cache(_MOST_SHAPES)
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


def in_runs(engines: Sequence[Engine], split: Split) -> Candidate:
    """The figures of several runs on ``engines``, those of one submodel, each on the one that pads it least."""
    counts = split.counts
    by_shape = {shape: by_padding(engines, shape)[0].candidate(shape) for shape in counts}
    longest = max(by_shape.values(), key=lambda one: one.latency_ms)

    def total(of: Callable[[Candidate], float]) -> float:
        return sum(count * of(by_shape[shape]) for shape, count in counts.items())

    together = total(lambda one: one.latency_ms)
    return Candidate(
        longest.engine,
        together,
        f"{together:.3g} ms in {sum(counts.values())} runs, the longest {longest.latency}",
        max(one.memory_mb for one in by_shape.values()),
        total(lambda one: one.p95_ms),
        total(lambda one: one.stated_ms),
        longest.estimate,
        any(one.is_noisy for one in by_shape.values()),
        Runs(split, by_shape),
        longest.cores,
    )


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
    """Advice about noisy figures, where some of ``candidates`` have them."""
    noisy = any(candidate.is_noisy for candidate in candidates)
    return "; noisy figures are not to be trusted: `nestforge measure BUNDLE` measures again" if noisy else ""


def batches(lengths: Array, buckets: Iterable[Bucket], truncate: bool, most: int | None = None) -> Iterator[Array]:
    """Row numbers, batch by batch, the longest rows first: rows go together by the least sequence that holds them, as
    many at a time as the largest bucket that takes it unpadded, and at most ``most``.

    Raises InputError, before the first batch, for a row that is longer than every bucket, unless ``truncate``.
    """
    buckets = list(buckets)
    sequences = np.array(sorted({bucket.sequence for bucket in buckets}))
    largest = {  # a range of longer sequences takes them as they are
        sequence: max(b.batch for b in buckets if b.smallest.sequence <= sequence <= b.sequence)
        for sequence in sequences.tolist()
    }
    longest = int(lengths.max())
    if longest > sequences[-1] and not truncate:
        raise InputError(
            f"row {int(lengths.argmax())}: {longest} steps, the largest bucket takes {sequences[-1]}; shorten it, "
            "truncate texts, or compile with a larger bucket"
        )
    order = np.argsort(-lengths, kind="stable")
    group = np.searchsorted(sequences, np.minimum(lengths[order], sequences[-1]))
    for number, sequence in reversed(list(enumerate(sequences.tolist()))):
        rows = order[group == number]
        size = min(largest[sequence], most or largest[sequence])
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


@dataclass(frozen=True)
class Split:
    """Rows in runs: ``parts`` are the numbers of the rows of each run and its shape, ``counts`` how many runs there are
    of each shape."""

    parts: Sequence[tuple[Array, Bucket]]
    counts: Mapping[Bucket, int]


def split(lengths: Array, buckets: Iterable[Bucket]) -> Split:
    """Rows of these ``lengths`` ``[N]`` in runs on engines of ``buckets``. Raises InputError as ``batches`` does."""
    parts = [(rows, Bucket(len(rows), max(1, int(lengths[rows].max())))) for rows in batches(lengths, buckets, False)]
    return Split(parts, Counter(shape for _, shape in parts))
