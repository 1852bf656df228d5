"""Requests: what an answer costs beside its engine, alone and beside others that compute."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time, sleep
from typing import Any

import numpy as np

from .. import ElasticModel, SelectionError, load
from ..bundle.device_files.measurements import HostMeasurement, keep_measurement
from ..bundle.open_bundle import Bundle, open_bundle
from ..compiler.work.clock import silent
from ..profiles.host_load import OthersLoad
from ..runtime.engines.measure import measure_bundle
from ..runtime.engines.onnxruntime.session import OPTIMIZATION_LEVEL, open_session, session_options
from ..runtime.inputs.arrays import random_feeds
from .harness import Row, benchmark, interleaved, milliseconds, ratio
from .subjects import CORES, default_session, eager_call, minilm, minilm_bundle, minilm_levels_bundle, tiny_bundle

_DISPATCH_ROUNDS, _DISPATCH_PAIRS = 20, 200
_WARM_US, _AFTER_RUN_US = 20, 60


@benchmark
def bench_dispatch() -> list[Row]:
    """What a request costs beside the engine's run: checks, choice, padding, the answer."""
    cases = (
        ("warm (an engine of 2 layers of 64)", tiny_bundle(), 1, _WARM_US),
        ("after a run (smallest MiniLM engine at 1x32)", minilm_bundle(), CORES, _AFTER_RUN_US),
    )
    rows = []
    for name, bundle, threads, bar in cases:
        rounds = _rounds(bundle, threads)
        rows.append(
            Row(
                f"dispatch over session.run, {name}",
                f"{median(rounds):.0f} us ({min(rounds):.0f} to {max(rounds):.0f})",
                f"< {bar} us",
                median(rounds) < bar,
                f"median of {_DISPATCH_ROUNDS} rounds, each the median of {_DISPATCH_PAIRS} pairs on one session",
            )
        )
    return rows


def _rounds(bundle: Path, threads: int) -> list[float]:
    """Microseconds that a request takes beyond the run of the smallest engine, of each round."""
    with load(bundle, residency="packed", threads=threads) as model:
        engine = min(model.bundle.manifest.engines, key=lambda e: e.flops)
        inputs = model.bundle.manifest.inputs
        feeds = random_feeds(inputs, engine.bucket)
        feeds |= {spec.name: np.ones_like(feeds[spec.name]) for spec in inputs if spec.row_needs}  # no padding
        model(feeds, submodel=engine.submodel)
        raw = model._pool.get(engine)  # the very session that answers, so that only the request differs

        def difference() -> float:
            alone = milliseconds(lambda: raw.run(feeds))
            return 1e3 * (milliseconds(lambda: model(feeds, submodel=engine.submodel)) - alone)

        return [median(difference() for _ in range(_DISPATCH_PAIRS)) for _ in range(_DISPATCH_ROUNDS)]


_SWITCH_ROUNDS, _SWITCH_PAIRS = 10, 100


@benchmark
def bench_switch() -> list[Row]:
    """What it costs a request that another submodel answered the one before it, both resident.

    Measured on engines that fit the caches together: with larger ones the weights of the one push those of the
    other out, which is a matter of the hardware and not of the choice."""
    with load(tiny_bundle(), residency="shared", threads=CORES, preload=True) as model:
        manifest = model.bundle.manifest
        bucket = min(engine.bucket for engine in manifest.engines)
        names = [entry.id for entry in sorted(manifest.submodels, key=lambda entry: entry.parameters)[:2]]
        feeds = random_feeds(manifest.inputs, bucket)

        def calls(name: str) -> Callable[[], Any]:
            return lambda: model(feeds, submodel=name)

        first, second = (calls(name) for name in names)
        rounds = [1e3 * _difference(first, second) for _ in range(_SWITCH_ROUNDS)]
    found = median(rounds)
    return [
        Row(
            "switch of submodel between two requests",
            f"{found:.0f} us (rounds {min(rounds):.0f} to {max(rounds):.0f})",
            "< 50 us",
            found < 50,
            f"a request after one to the other submodel, less one after its own; medians of {_SWITCH_PAIRS} in "
            f"turns, mean of both, median of {_SWITCH_ROUNDS} rounds; 2 layers of 64 at {bucket.label}, shared",
        )
    ]


def _difference(first: Callable[[], Any], second: Callable[[], Any]) -> float:
    """Milliseconds by which a call takes longer after the other one than after itself, on average over both."""
    after_other: dict[int, list[float]] = {0: [], 1: []}
    after_itself: dict[int, list[float]] = {0: [], 1: []}
    calls = (first, second)
    for _ in range(_SWITCH_PAIRS):
        for mine, other in ((0, 1), (1, 0)):
            calls[other]()
            after_other[mine].append(milliseconds(calls[mine]))
            after_itself[mine].append(milliseconds(calls[mine]))
    return sum(median(after_other[i]) - median(after_itself[i]) for i in (0, 1)) / 2


_FACTORS = (5.0, 1 / 5)
_MOST_REQUESTS = 100
_IN_A_ROW = 5
_BAR = 50


@benchmark
def bench_correction() -> list[Row]:
    """Limits lie between the times of each two neighbouring levels, and above the largest."""
    with TemporaryDirectory() as folder:
        path = Path(shutil.copytree(minilm_levels_bundle(), Path(folder) / "wrong.bundle"))
        bundle = open_bundle(path)
        others = OthersLoad()
        right = measure_bundle(bundle, silent, threads=CORES, force=True).measurement
        times = sorted(engine.points[0].p50_ms for engine in right.engines)
        limits = [sqrt(low * high) for low, high in zip(times, [*times[1:], 2 * times[-1]], strict=True)]
        counts = {(factor, limit): _requests(bundle, right, factor, limit) for factor in _FACTORS for limit in limits}
        busy = others.share()
    return [
        Row(
            f"requests until the choice is right, latencies x {factor:g}",
            ", ".join(str(counts[factor, limit]) for limit in limits),
            f"<= {_BAR}",
            all(counts[factor, limit] <= _BAR for limit in limits),
            f"whole engines of {len(times)} levels of MiniLM at 1x32, a limit between each two and above the largest, "
            f"refused ones count; right is what the bundle chooses with measured figures, {_IN_A_ROW} times in a row; "
            f"others used {'?' if busy is None else f'{busy:.0%}'} of the CPUs",
        )
        for factor in _FACTORS
    ]


def _requests(bundle: Bundle, right: HostMeasurement, factor: float, limit_ms: float) -> int:
    """How many requests within ``limit_ms`` a bundle that states ``factor`` times the ``right`` figures answers or
    refuses before it chooses as one with these, which answers the same requests: several times in a row, so that it
    did not so by chance."""
    feeds = random_feeds(bundle.manifest.inputs, bundle.manifest.engines[0].bucket)
    keep_measurement(bundle, right)
    with load(bundle.path, threads=CORES) as reference:
        keep_measurement(bundle, _scaled(right, factor))
        with load(bundle.path, threads=CORES) as wrong:
            alike = 0
            for number in range(_MOST_REQUESTS):
                alike = alike + 1 if _chosen(wrong, limit_ms) == _chosen(reference, limit_ms) else 0
                if alike == _IN_A_ROW:
                    return number + 1 - _IN_A_ROW
                for model in (reference, wrong):
                    with suppress(SelectionError):
                        model(feeds, latency_ms=limit_ms)
    return _MOST_REQUESTS


def _chosen(model: ElasticModel, limit_ms: float) -> str | None:
    bucket = model.bundle.manifest.engines[0].bucket
    try:
        return model.choose(bucket.batch, bucket.sequence, latency_ms=limit_ms).engine.id
    except SelectionError:
        return None


def _scaled(measured: HostMeasurement, factor: float) -> HostMeasurement:
    engines = []
    for engine in measured.engines:
        points = tuple(
            replace(point, p50_ms=factor * point.p50_ms, p95_ms=point.p95_ms and factor * point.p95_ms)
            for point in engine.points
        )
        engines.append(replace(engine, points=points))
    return replace(measured, engines=tuple(engines))


_BESIDE_ROUNDS, _RUNS = 15, 5
_IDLE = 0.1
_CALLERS = 4

Call = Callable[[], object]


@benchmark
def bench_beside() -> list[Row]:
    """Our engine in a process with others that compute: a default session, PyTorch, and four threads that call it.

    Each round measures all calls alone and in turns; figures are medians over rounds."""
    subject = minilm()
    universal, feeds = subject.model.spec.universal().id, subject.feeds()
    engine = subject.engine(universal).absolute()
    own = open_session(engine, session_options(CORES, OPTIMIZATION_LEVEL, packed=True))
    used = {entry.name: feeds[entry.name] for entry in own.get_inputs()}
    sessions = [default_session(subject.plain(universal)) for _ in range(2)]
    default, second = (lambda: sessions[0].run(None, feeds)), (lambda: sessions[1].run(None, feeds))
    calls: Mapping[str, Call] = {"ours": lambda: own.run(None, used), "second": second}
    eager = eager_call(subject.model.module, feeds)
    return [
        _idle(calls),
        *_in_turns("a default session", default, calls),
        *_in_turns("PyTorch", eager, calls),
        _four_callers(calls),
    ]


def _idle(calls: Mapping[str, Call]) -> Row:
    spent = {name: median(_spent_idle(call) for _ in range(_RUNS)) for name, call in calls.items()}
    return Row(
        "processor time after a run has ended",
        f"{spent['ours']:.1f} ms (a default session {spent['second']:.1f} ms)",
        "< 1 ms",
        spent["ours"] < 1,
        f"in the {1e3 * _IDLE:.0f} ms after it, {CORES} threads, median of {_RUNS}",
    )


def _spent_idle(call: Call) -> float:
    call()
    began = process_time()
    sleep(_IDLE)
    return 1e3 * (process_time() - began)


def _in_turns(name: str, other: Call, calls: Mapping[str, Call]) -> list[Row]:
    """Our latency in turns with ``other``, and its own, each beside that with a second default session in our place."""
    mine: dict[str, list[float]] = {call: [] for call in calls}
    theirs: dict[str, list[float]] = {call: [] for call in calls}
    for _ in range(_BESIDE_ROUNDS):
        for place, call in calls.items():
            alone = interleaved({"mine": call, "theirs": other}, rounds=1, runs=_RUNS, warmup=0)
            pairs = [(milliseconds(other), milliseconds(call)) for _ in range(_RUNS + 1)][1:]
            theirs[place].append(median(first for first, _ in pairs) / alone["theirs"][0])
            mine[place].append(median(last for _, last in pairs) / alone["mine"][0])
    ours, usual = median(mine["ours"]), median(mine["second"])
    slowed, usually = median(theirs["ours"]), median(theirs["second"])
    how = f"median ratio of {_BESIDE_ROUNDS} rounds, MiniLM 1x128 in turns without a pause, {CORES} threads each"
    return [
        Row(
            f"our engine in turns with {name}, over alone",
            f"{ours:.2f}x (a default session in its place {usual:.2f}x)",
            "<= the default session's",
            ours <= usual,
            how,
        ),
        Row(
            f"{name} in turns with our engine, over alone",
            f"{slowed:.2f}x (with a default session in its place {usually:.2f}x)",
            "<= 1.05x",
            slowed <= 1.05,
            how,
        ),
    ]


def _each(spread: Callable[..., Iterator[object]], call: Call, requests: range) -> None:
    deque(spread(lambda _: call(), requests), maxlen=0)


def _four_callers(calls: Mapping[str, Call]) -> Row:
    requests = range(_CALLERS * _RUNS)
    with ThreadPoolExecutor(_CALLERS) as pool:
        ways: dict[str, Call] = {}
        for name, call in calls.items():
            ways[f"{name} alone"] = partial(_each, map, call, requests)
            ways[f"{name} at once"] = partial(_each, pool.map, call, requests)
        times = interleaved(ways, _BESIDE_ROUNDS, runs=1, warmup=1)
    gain = {name: ratio(times, f"{name} alone", f"{name} at once") for name in calls}
    against = ratio(times, "second at once", "ours at once")
    return Row(
        "requests a second of four threads over one thread's",
        f"{gain['ours']:.2f}x (a default session {gain['second']:.2f}x; ours at once {against:.2f}x its speed)",
        ">= 1.0x",
        gain["ours"] >= 1,
        f"median ratio of {_BESIDE_ROUNDS} rounds, MiniLM 1x128, {CORES} threads a run",
    )
