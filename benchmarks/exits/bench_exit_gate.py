"""What gate and compaction cost at each exit, beside the engines and the copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from ...bundle.entries.engine_entry import EngineEntry
from ...runtime.engines.pool import EnginePool
from ...runtime.exits.batch_plan import BatchPlan
from ...runtime.exits.chain import ExitChain
from ...runtime.exits.host_workspace import HostWorkspace
from ...runtime.inputs.arrays import Array
from ..harness import Row, milliseconds
from ..subjects import CORES
from .exit_subject import deepest, exits_bundle, half_the_flops, requests

_BATCH, _REQUESTS, _RUNS = 32, 20, 15


def run() -> list[Row]:
    bundle, policy = exits_bundle(), half_the_flops().policy()
    pool = _TimedPool(bundle, dict.fromkeys((e.id for e in bundle.manifest.engines), "packed"), CORES)
    keep, moved = HostWorkspace.keep, [0.0]

    def timed_keep(
        self: HostWorkspace, positions: Array, old: BatchPlan, new: BatchPlan, source: int
    ) -> tuple[Array, int]:
        began = perf_counter()
        result = keep(self, positions, old, new, source)
        moved[0] += 1e3 * (perf_counter() - began)
        return result

    HostWorkspace.keep = timed_keep  # type: ignore[method-assign]
    try:
        chain = ExitChain(bundle, deepest(bundle), pool, bundle.build.latencies)
        gates: list[float] = []
        moving: list[float] = []
        requests_us: list[float] = []
        for feeds in requests(bundle, _BATCH, _REQUESTS):
            gated = max(1, int(chain.run(feeds, policy).index.max()))  # exits whose gate let rows on
            taken = []
            for _ in range(_RUNS):
                pool.calls.clear()
                moved[0] = 0.0
                total = milliseconds(partial(chain.run, feeds, policy))
                between = sum(after[0] - before[1] for before, after in pairwise(pool.calls))
                around = total - 1e3 * (pool.calls[-1][1] - pool.calls[0][0])
                taken.append(((1e3 * between - moved[0]) / gated, moved[0] / gated, around))
            for figures, column in zip((gates, moving, requests_us), zip(*taken, strict=True), strict=True):
                figures.append(1e3 * median(column))
    finally:
        HostWorkspace.keep = keep  # type: ignore[method-assign]
        pool.close()
    gate = median(gates)
    return [
        Row(
            f"gate and books per exit, batch {_BATCH}",
            f"{gate:.0f} us, and {median(moving):.0f} us for moving rows together; {median(requests_us):.0f} us a "
            "request for its checks, its filling and its answer",
            "< 100 us beside the copy",
            gate < 100,
            "time from the end of an engine to the start of the next, without the moving, over exits whose gate let "
            f"rows on; median over {_REQUESTS} requests of {_RUNS} runs",
        )
    ]


class _TimedPool(EnginePool):
    """A pool whose engines note when each run began and ended, in seconds."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[tuple[float, float]] = []

    def get(self, engine: EngineEntry) -> Any:
        runner, pool = super().get(engine), self

        class Timed:
            def bind(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
                call = runner.bind(feeds, outputs)

                def timed() -> None:
                    began = perf_counter()
                    call()
                    pool.calls.append((began, perf_counter()))

                return timed

        return Timed()
