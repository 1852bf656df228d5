"""Time that a calibrated chain saves against the FLOPs that it saves, on real texts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import median

from ... import load
from ...runtime.exits.choice import OFF
from ...runtime.exits.policy import ExitPolicy
from ...runtime.inputs.arrays import Array
from ...runtime.model import ElasticModel
from ..harness import Row, milliseconds
from .exit_subject import BATCHES, exits_bundle, half_the_flops, requests

_REQUESTS = {1: 200, 8: 60, 32: 25}
_RUNS = 5


def run() -> list[Row]:
    bundle, policy = exits_bundle(), half_the_flops().policy()
    engines = {engine.id: engine for engine in bundle.manifest.engines}
    rows = []
    with load(bundle.path, residency="packed") as model:
        for batch in BATCHES:
            whole_ms = chain_ms = whole_flops = chain_flops = 0.0
            for feeds in requests(bundle, batch, _REQUESTS[batch]):
                whole, chain = model(feeds, exits=OFF), model(feeds, exits=policy)
                assert chain.exits is not None
                chain_flops += float(chain.exits.flops.sum())
                whole_flops += batch * engines[whole.engine].flops / whole.bucket.batch
                pairs = [_pair(model, feeds, policy) for _ in range(_RUNS)]
                whole_ms += median(pair[0] for pair in pairs)
                chain_ms += median(pair[1] for pair in pairs)
            time_saved, flops_saved = 1 - chain_ms / whole_ms, 1 - chain_flops / whole_flops
            rows.append(
                Row(
                    f"calibrated chain, batch {batch}: time saved over FLOPs saved",
                    f"{time_saved / flops_saved:.2f} ({time_saved:.1%} of the time, {flops_saved:.1%} of the FLOPs)",
                    ">= 0.9",
                    time_saved >= 0.9 * flops_saved,
                    f"{_REQUESTS[batch]} requests of test texts at their own lengths, each the median of {_RUNS} "
                    "interleaved runs; thresholds calibrated to half of the FLOPs at batch 1",
                )
            )
    return rows


def _pair(model: ElasticModel, feeds: Mapping[str, Array], policy: ExitPolicy) -> tuple[float, float]:
    return milliseconds(partial(model, feeds, exits=OFF)), milliseconds(partial(model, feeds, exits=policy))
