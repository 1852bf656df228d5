"""Our engine in a process with others that compute: a default session, PyTorch, and four threads that call it.

Each round measures all calls alone and in turns; figures are medians over rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from time import process_time, sleep

from ...runtime.engines.onnxruntime.session import OPTIMIZATION_LEVEL, open_session, session_options
from ..harness import Row, interleaved, milliseconds, ratio
from ..subjects import CORES, default_session, eager_call, minilm

_ROUNDS, _RUNS = 15, 5
_IDLE = 0.1
_CALLERS = 4

Call = Callable[[], object]


def run() -> list[Row]:
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
    for _ in range(_ROUNDS):
        for place, call in calls.items():
            alone = interleaved({"mine": call, "theirs": other}, rounds=1, runs=_RUNS, warmup=0)
            pairs = [(milliseconds(other), milliseconds(call)) for _ in range(_RUNS + 1)][1:]
            theirs[place].append(median(first for first, _ in pairs) / alone["theirs"][0])
            mine[place].append(median(last for _, last in pairs) / alone["mine"][0])
    ours, usual = median(mine["ours"]), median(mine["second"])
    slowed, usually = median(theirs["ours"]), median(theirs["second"])
    how = f"median ratio of {_ROUNDS} rounds, MiniLM 1x128 in turns without a pause, {CORES} threads each"
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
        times = interleaved(ways, _ROUNDS, runs=1, warmup=1)
    gain = {name: ratio(times, f"{name} alone", f"{name} at once") for name in calls}
    against = ratio(times, "second at once", "ours at once")
    return Row(
        "requests a second of four threads over one thread's",
        f"{gain['ours']:.2f}x (a default session {gain['second']:.2f}x; ours at once {against:.2f}x its speed)",
        ">= 1.0x",
        gain["ours"] >= 1,
        f"median ratio of {_ROUNDS} rounds, MiniLM 1x128, {CORES} threads a run",
    )
