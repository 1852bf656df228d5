"""Shared by every benchmark: a row of the table, and fair timing of alternatives."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

_PAUSE = 0.05


@dataclass(frozen=True)
class Row:
    """One figure, its bar, and how it was measured; units are in the texts."""

    figure: str
    measured: str
    bar: str
    reached: bool
    how: str


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {}


def benchmark(function: Callable[[], list[Row]]) -> Callable[[], list[Row]]:
    """Adds ``bench_NAME`` to the benchmarks that can be requested by name."""
    BENCHMARKS[function.__name__.removeprefix("bench_")] = function
    return function


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int, runs: int = 5, warmup: int = 2
) -> dict[str, list[float]]:
    """Milliseconds per call: for every round and alternative, in turn, the median of ``runs`` after one more.

    A machine that slows down slows all alternatives of a round alike, so ratios per round stay fair.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            sleep(_PAUSE)  # default sessions spin on for a while after a run, on the cores that the next one needs
            call()  # caches belong to this alternative again
            times[name].append(median(milliseconds(call) for _ in range(runs)))
    return times


def ratio(times: Mapping[str, list[float]], alternative: str, ours: str) -> float:
    """Median over rounds of the alternative's time over ours."""
    return median(a / b for a, b in zip(times[alternative], times[ours], strict=True))


def speed_row(figure: str, times: Mapping[str, list[float]], theirs: str, ours: str, bar: float, how: str) -> Row:
    """How many times as fast as ``theirs`` ``ours`` is, by times of ``interleaved``; ``bar`` in the same unit."""
    speed = ratio(times, theirs, ours)
    measured = f"{speed:.2f}x (best {min(times[ours]):.2f} against {min(times[theirs]):.2f} ms)"
    return Row(figure, measured, f">= {bar:g}x", speed >= bar, how)


def milliseconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = perf_counter()
    call()
    return 1e3 * (perf_counter() - began)


CACHE = Path(".cache/bench")
_PACKAGE = Path(__file__).parents[1]
_MEASURED = ("bundle", "compiler", "exporters", "profiles", "runtime")
_MARK = "sources.sha256"


def forget_what_others_made(folder: Path, package: Path = _PACKAGE) -> bool:
    """Empties ``folder`` where other sources of ``package`` filled it; returns whether there was anything to remove."""
    mark, sources = folder / _MARK, sources_digest(package)
    if mark.exists() and mark.read_text() == sources:
        return False
    found = folder.exists() and any(folder.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark.write_text(sources)
    return found


def sources_digest(package: Path) -> str:
    """The SHA-256 of the modules that compile and answer, names and text; not of the tools around them."""
    files = [path for folder in _MEASURED for path in package.joinpath(folder).rglob("*.py")]
    total = hashlib.sha256()
    for path in sorted([*files, *package.glob("*.py")]):
        total.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return total.hexdigest()
