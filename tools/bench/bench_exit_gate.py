"""What gate and compaction cost at each exit, beside the engines and the copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from ...runtime.arrays import Array
from ...runtime.engine_pool import EnginePool
from ...runtime.exits.chain import ExitChain
from ...runtime.manifest import EngineEntry
from .exit_subject import deepest, exits_bundle, half_the_flops, requests
from .harness import Row, milliseconds
from .subjects import CORES

_BATCH, _REQUESTS, _RUNS = 32, 20, 15


def run() -> list[Row]:
    bundle, policy = exits_bundle(), half_the_flops().policy()
    pool = _TimedPool(bundle, dict.fromkeys((e.id for e in bundle.manifest.engines), "packed"), CORES)
    try:
        chain = ExitChain(bundle, deepest(bundle), pool, bundle.build.latencies)
        overheads, copies = [], []
        for feeds in requests(bundle, _BATCH, _REQUESTS):
            passed = int(chain.run(feeds, policy).index.max()) + 1  # exits at which a gate decided, the last included
            taken = []
            for _ in range(_RUNS):
                pool.spent = 0.0
                total = milliseconds(partial(chain.run, feeds, policy))
                taken.append((total - pool.spent) / passed)
            overheads.append(median(taken))
            copies.append(_copy_ms(chain, feeds, policy))
    finally:
        pool.close()
    gate = 1e3 * (median(overheads) - median(copies))
    return [
        Row(
            f"gate and compaction per exit, batch {_BATCH}",
            f"{gate:.0f} us beside a copy of {1e3 * median(copies):.0f} us",
            "< 100 us",
            gate < 100,
            f"time of the chain outside its engines over exits passed, median over {_REQUESTS} requests of {_RUNS} "
            "runs; checking the request and building its answer included",
        )
    ]


def _copy_ms(chain: ExitChain, feeds: Mapping[str, Array], policy: Any) -> float:
    """A plain copy of the rows that stay, per exit: what no compaction can do without."""
    states: list[Array] = []
    chain.run(feeds, policy, lambda run: states.append(run.state.copy()) if run.state is not None else None)
    kept = [np.ascontiguousarray(state[: max(1, len(state) // 2)]) for state in states]
    targets = [np.empty_like(state) for state in kept]

    def copy() -> None:
        for target, state in zip(targets, kept, strict=True):
            target[...] = state

    return median(milliseconds(copy) for _ in range(_RUNS)) / max(1, len(kept))


class _TimedPool(EnginePool):
    """A pool whose engines add the time of their runs to ``spent``."""

    spent = 0.0

    def get(self, engine: EngineEntry) -> Any:
        runner, pool = super().get(engine), self

        class Timed:
            def bind(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
                call = runner.bind(feeds, outputs)

                def timed() -> None:
                    began = perf_counter()
                    call()
                    pool.spent += 1e3 * (perf_counter() - began)

                return timed

        return Timed()
