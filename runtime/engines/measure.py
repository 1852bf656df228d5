"""Latency and memory of engines as they run here: one engine, engines in turns, all of a bundle.

Engines in turns are each timed several times: the best round is the figure, and the others say how far to trust it. A
bundle's measurement becomes a record that it keeps beside those of other hosts.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import psutil

from ...bucket import Bucket
from ...bundle.build_record import LatencyPoint, Noise
from ...bundle.device_files.measurements import HostMeasurement, MeasuredEngine, MeasuredPoint
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.task_entry import BASE
from ...bundle.open_bundle import Bundle, open_bundle
from ...errors import BundleError, SelectionError
from ...profiles.host_load import OthersLoad, others_now, require_quiet
from ...progress import Progress, counted
from ..device.threads import threads_or_default
from ..inputs.arrays import Array, random_feeds
from .latencies import measuring_host
from .memory import residencies_for
from .residency import Residency
from .runner import Runner, runnable_engines, runner_for

_ROUNDS = 3
# Runs and rounds of a static engine.
_WARMUP_RUNS = 3
_ROUND_SECONDS = 0.3
# In a round of a static engine, and for a percentile.
_LEAST_RUNS = 10
# Rounds of an engine of a range, at each shape: many runs where they are short, one a round at the largest. The first
# run at a shape takes longer, so that its round is not the best.
_SHAPE_SECONDS = 0.01
# Whole engines that are open at once while they are measured: each may own a packed copy of its weights.
_ENGINES_OPEN_AT_ONCE = 4
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class LatencyStats:
    """Milliseconds over ``runs`` timed runs; ``spread`` is the interquartile range over the median."""

    runs: int
    p50: float
    p95: float
    p99: float
    spread: float


def measure(
    runner: Runner, feeds: Mapping[str, Array], *, warmup: int = 3, min_runs: int = 20, max_seconds: float = 2.0
) -> LatencyStats:
    """Times ``runner`` on ``feeds``: at least ``min_runs``, then on until ``max_seconds`` have passed."""
    return latency_stats(times_of(lambda: runner.run(feeds), warmup=warmup, min_runs=min_runs, max_seconds=max_seconds))


def times_of(call: Callable[[], object], *, warmup: int, min_runs: int, max_seconds: float) -> list[float]:
    """Milliseconds of each ``call`` behind ``warmup`` ones: of at least ``min_runs``, then on until ``max_seconds``
    have passed."""
    for _ in range(warmup):
        call()
    times: list[float] = []
    began = perf_counter()
    while len(times) < min_runs or perf_counter() - began < max_seconds:
        start = perf_counter()
        call()
        times.append(1e3 * (perf_counter() - start))
    return times


def latency_stats(times: Sequence[float]) -> LatencyStats:
    """Statistics of ``times`` in milliseconds, at least one."""
    p25, p50, p75, p95, p99 = map(float, np.percentile(times, [25, 50, 75, 95, 99]))
    return LatencyStats(len(times), p50, p95, p99, (p75 - p25) / p50 if p50 else 0.0)


@dataclass(frozen=True)
class Timed:
    """An open engine and inputs of one shape; ``is_static`` where it has no other."""

    runner: Runner
    feeds: Mapping[str, Array]
    is_static: bool


@dataclass(frozen=True)
class Measured:
    """Median and 95th percentile of the best round in milliseconds, and how far to trust them; few runs have no
    percentile."""

    p50_ms: float
    p95_ms: float | None
    noise: Noise


def measured_shapes(bucket: Bucket) -> list[Bucket]:
    """The shapes at which an engine is measured: its own, or of a range its ends, and the powers of two of its sequence
    between, at the least and the most rows."""
    if bucket.is_static:
        return [bucket]
    batches = sorted({bucket.smallest.batch, bucket.batch})
    return [Bucket(batch, sequence) for batch in batches for sequence in bucket.doublings]


def measured_together(engines: Sequence[EngineEntry]) -> list[list[EngineEntry]]:
    """Engines that are measured in turns: all buckets of a segment, since the chain weighs those against each other."""
    files = list({engine.file: engine for engine in engines}.values())
    wholes = [engine for engine in files if engine.segment is None]
    groups = [wholes[start : start + _ENGINES_OPEN_AT_ONCE] for start in range(0, len(wholes), _ENGINES_OPEN_AT_ONCE)]
    segments: dict[str, list[EngineEntry]] = {}
    for engine in files:
        if engine.segment is not None:
            segments.setdefault(engine.file.removesuffix(f".{engine.bucket.label}.onnx"), []).append(engine)
    return [*groups, *segments.values()]


def with_measured(point: LatencyPoint, measured: Measured) -> LatencyPoint:
    """``point`` with what was measured at its shape."""
    return replace(point, measured_p50_ms=measured.p50_ms, measured_p95_ms=measured.p95_ms, noise=measured.noise)


def best_of_rounds(timed: Sequence[Timed]) -> list[Measured]:
    """Each of ``timed`` in its best of several rounds, all in turn.

    Another program's burst then spoils a round of some engines, not the proportions between them.
    """
    rounds: list[list[list[float]]] = [[] for _ in timed]
    load = OthersLoad()
    for _ in range(_ROUNDS):
        for each, times in zip(timed, rounds, strict=True):
            times.append(_round(each))
    others = load.share()
    return [_best(times, others) for times in rounds]


def _round(timed: Timed) -> list[float]:
    run = partial(timed.runner.run, timed.feeds)
    if timed.is_static:
        return times_of(run, warmup=_WARMUP_RUNS, min_runs=_LEAST_RUNS, max_seconds=_ROUND_SECONDS)
    return times_of(run, warmup=0, min_runs=1, max_seconds=_SHAPE_SECONDS)


def _best(rounds: Sequence[Sequence[float]], others: float | None) -> Measured:
    """The noise is that of all rounds: the best one of a large shape is a single run."""
    best, again, *_ = sorted(map(latency_stats, rounds), key=lambda one: one.p50)
    every = latency_stats([ms for times in rounds for ms in times])
    noise = Noise(every.runs, every.spread, again.p50 / best.p50 if best.p50 else None, others)
    return Measured(best.p50, best.p95 if best.runs >= _LEAST_RUNS else None, noise)


@dataclass(frozen=True)
class BundleMeasurement:
    """Measurements; ``left_out`` says of engines that were not, by id, why."""

    measurement: HostMeasurement
    left_out: Mapping[str, str]


def measure_bundle(
    bundle: Bundle,
    progress: Progress,
    *,
    threads: int | None = None,
    memory_mb: float | None = None,
    force: bool = False,
) -> BundleMeasurement:
    """Times every engine that can run here, in the residency that it would have under ``memory_mb``, on ``threads``
    cores (by default the ones that this process may use).

    Raises MeasurementError on a host that is too busy to measure, unless ``force``; BundleIncompatibleError where no
    engine can run, SelectionError where none fits the memory.
    """
    cores = threads_or_default(threads)
    engines = runnable_engines(bundle)
    residencies = residencies_for(bundle, engines, memory_mb)
    if not force:
        require_quiet(others_now(_LOOK_SECONDS))
    merged = bundle.with_merged(BASE)
    held: dict[str, Residency] = {
        **residencies,
        **dict.fromkeys((engine.id for engine in merged.manifest.engines), "packed"),
    }
    taking_part = [engine for engine in (*engines, *merged.manifest.engines) if engine.id in held]
    groups = [
        (one, group)
        for one in (bundle, merged)
        for group in measured_together([engine for engine in one.manifest.engines if engine in taking_part])
    ]
    by_file: dict[str, tuple[MeasuredPoint, ...]] = {}
    for one, group in counted(progress, "measure", groups):
        by_file |= _measured(one, group, held, cores)
    if not force:  # it may have become busy since
        shares = [point.noise.others_share for points in by_file.values() for point in points]
        require_quiet(min((share for share in shares if share is not None), default=None))
    measured = tuple(MeasuredEngine(one.id, held[one.id], by_file[one.file]) for one in taking_part)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    runnable = {engine.id for engine in engines}
    left_out = {
        engine.id: "no memory" if engine.id in runnable else f"no backend {engine.backend} here"
        for engine in bundle.manifest.engines
        if engine.id not in residencies
    }
    return BundleMeasurement(HostMeasurement(measuring_host(bundle), cores, created, measured), left_out)


def _measured(
    bundle: Bundle, engines: Sequence[EngineEntry], residencies: Mapping[str, Residency], threads: int
) -> dict[str, tuple[MeasuredPoint, ...]]:
    """By file, the figures of ``engines`` at their shapes."""
    shapes = [(engine, shape) for engine in engines for shape in measured_shapes(engine.bucket)]
    with ExitStack() as stack:
        runners = {
            engine.file: stack.enter_context(runner_for(bundle, engine, residencies[engine.id], threads))
            for engine in engines
        }
        timed = [
            Timed(
                runners[engine.file],
                random_feeds(bundle.manifest.interface_of(engine)[0], shape),
                engine.bucket.is_static,
            )
            for engine, shape in shapes
        ]
        found: dict[str, tuple[MeasuredPoint, ...]] = {}
        for (engine, shape), measured in zip(shapes, best_of_rounds(timed), strict=True):
            point = MeasuredPoint(shape.batch, shape.sequence, measured.p50_ms, measured.noise, measured.p95_ms)
            found[engine.file] = (*found.get(engine.file, ()), point)
    return found


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that engines added to a process: ``private`` belongs to it alone, ``resident`` also counts mapped pages,
    which other processes may share and the system may drop. A page that several engines map counts once (on Linux,
    the proportional set size).
    """

    private: int
    resident: int


def memory_use(
    bundle: str | os.PathLike[str],
    engines: Sequence[str],
    residency: Residency,
    threads: int = 1,
    at: Bucket | None = None,
) -> MemoryUse:
    """Memory that these engines take when open together and run once, measured in a process of their own.

    An engine of a range runs at the shape nearest to ``at``, its largest without one.

    Raises SelectionError for an unknown engine id, BundleError if the process fails.
    """
    known = {engine.id for engine in open_bundle(bundle).manifest.engines}
    for engine in engines:
        if engine not in known:
            raise SelectionError(f"no engine {engine!r} in this bundle; it has {', '.join(sorted(known))}")
    task = json.dumps([str(Path(bundle).absolute()), list(engines), residency, threads, str(at) if at else None])
    done = subprocess.run([sys.executable, "-m", __name__, task], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next(reversed(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
        raise BundleError(f"bundle {bundle}: measuring memory failed: {reason}")
    return MemoryUse(**json.loads(done.stdout))


def _memory_of_this_process() -> tuple[int, int]:
    process = psutil.Process()
    rollup = Path("/proc/self/smaps_rollup")
    if rollup.exists():
        rows = dict(line.split(":", 1) for line in rollup.read_text().splitlines() if ":" in line)
        return int(rows["Anonymous"].split()[0]) * 1024, int(rows["Pss"].split()[0]) * 1024
    return process.memory_full_info().uss, process.memory_info().rss


def _measure_memory(
    bundle_path: str, engine_ids: Sequence[str], residency: Residency, threads: int, at: str | None
) -> MemoryUse:
    bundle = open_bundle(bundle_path)
    engines = {engine.id: engine for engine in bundle.manifest.engines}
    runners = [runner_for(bundle, engines[name], residency, threads) for name in engine_ids]
    private, resident = _memory_of_this_process()
    with ExitStack() as stack:
        for name, runner in zip(engine_ids, runners, strict=True):
            engine = engines[name]
            shape = engine.bucket.nearest(Bucket.parse(at) if at else engine.bucket.largest)
            stack.enter_context(runner).run(random_feeds(bundle.manifest.interface_of(engine)[0], shape))
        private_after, resident_after = _memory_of_this_process()
    return MemoryUse(max(0, private_after - private), max(0, resident_after - resident))


if __name__ == "__main__":
    use = _measure_memory(*json.loads(sys.argv[1]))
    print(json.dumps({"private": use.private, "resident": use.resident}))
