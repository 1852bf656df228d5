"""Latency and memory of engines as they run here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import psutil

from ...bucket import Bucket
from ...bundle.open_bundle import open_bundle
from ...errors import BundleError, SelectionError
from ..inputs.arrays import Array
from ..inputs.feeds import random_feeds
from .contract.residency import Residency
from .runner import Runner, runner_for


@dataclass(frozen=True)
class LatencyStats:
    """Milliseconds over ``runs`` timed runs; ``spread`` is the interquartile range over the median."""

    runs: int
    p50: float
    p95: float
    p99: float
    spread: float


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that engines added to a process: ``private`` belongs to it alone, ``resident`` also counts mapped pages,
    which other processes may share and the system may drop. A page that several engines map counts once (on Linux,
    the proportional set size).
    """

    private: int
    resident: int


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
    """Of ``times`` in milliseconds, at least one."""
    p25, p50, p75, p95, p99 = map(float, np.percentile(times, [25, 50, 75, 95, 99]))
    return LatencyStats(len(times), p50, p95, p99, (p75 - p25) / p50 if p50 else 0.0)


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
