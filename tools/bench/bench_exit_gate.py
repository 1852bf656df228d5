"""What gate and compaction cost at each exit, beside the engines and the copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from ...runtime.arrays import Array
from ...runtime.engine_pool import EnginePool
from ...runtime.exits.chain import ExitChain
from ...runtime.exits.cover import Cover
from ...runtime.exits.workspace import Workspace
from ...runtime.manifest import EngineEntry
from .exit_subject import deepest, exits_bundle, half_the_flops, requests
from .harness import Row, milliseconds
from .subjects import CORES

_BATCH, _REQUESTS, _RUNS = 32, 20, 15


def run() -> list[Row]:
    bundle, policy = exits_bundle(), half_the_flops().policy()
    pool = _TimedPool(bundle, dict.fromkeys((e.id for e in bundle.manifest.engines), "packed"), CORES)
    keep, moved = Workspace.keep, [0.0]

    def timed_keep(self: Workspace, positions: Array, old: Cover, new: Cover, source: int) -> tuple[Array, int]:
        began = perf_counter()
        result = keep(self, positions, old, new, source)
        moved[0] += 1e3 * (perf_counter() - began)
        return result

    Workspace.keep = timed_keep  # type: ignore[method-assign]
    try:
        chain = ExitChain(bundle, deepest(bundle), pool, bundle.build.latencies)
        beside, moving = [], []
        for feeds in requests(bundle, _BATCH, _REQUESTS):
            passed = int(chain.run(feeds, policy).index.max()) + 1  # exits at which a gate decided, the last included
            taken = []
            for _ in range(_RUNS):
                pool.spent = moved[0] = 0.0
                total = milliseconds(partial(chain.run, feeds, policy))
                taken.append(((total - pool.spent - moved[0]) / passed, moved[0] / max(1, passed - 1)))
            beside.append(median(pair[0] for pair in taken))
            moving.append(median(pair[1] for pair in taken))
    finally:
        Workspace.keep = keep  # type: ignore[method-assign]
        pool.close()
    gate = 1e3 * median(beside)
    return [
        Row(
            f"gate per exit, batch {_BATCH}",
            f"{gate:.0f} us, and {1e3 * median(moving):.0f} us for moving rows together",
            "< 100 us beside the copy",
            gate < 100,
            "time of the chain outside its engines and outside the moving, over exits passed, checks of the request "
            f"and its answer included; median over {_REQUESTS} requests of {_RUNS} runs",
        )
    ]


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
