"""Compiled masked-token models on rows that nothing was trained on: accuracy, routes, and what they cost.

Everything is asked of the runtime, and every engine of one batch takes turns with all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.open_bundle import Bundle
from ...errors import InputError
from ...progress import Progress
from ...runtime.calibrate.measure import time_in_turns
from ...runtime.consistency.tallies import log_softmax, negative_log_likelihood
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.runner import Runner, runner_for
from ...runtime.inputs.arrays import Array
from ...runtime.inputs.files import read_npz
from ...tables import Table

_TIMED = 8  # calls of an engine in one turn
_MOST_BYTES = 2**28


@dataclass(frozen=True, eq=False)
class HiddenTokens:
    """Inputs of a model by name, ``[N, S]`` int64, in which ``positions`` ``[N, K]`` held ``targets`` ``[N, K]``."""

    inputs: Mapping[str, Array]
    positions: Array
    targets: Array


@dataclass(frozen=True)
class Measured:
    """One engine of a model: ``values`` of its submodel by axis kind, parameters, and per row of its bucket FLOPs and
    ``milliseconds``.

    ``group`` is how many tokens are routed together, None for a model that does not route. ``accuracy`` and ``loss``
    (nats) are those of the hidden tokens; ``dropped`` is, by tensor of routes, the share of tokens that no expert
    computed.
    """

    model: str
    values: Mapping[str, int]
    bucket: Bucket
    group: int | None
    parameters: int
    flops: float
    milliseconds: float
    accuracy: float
    loss: float
    dropped: Mapping[str, float]


def read_hidden_tokens(path: Path) -> HiddenTokens:
    """Reads what training wrote. Raises InputError for another file."""
    arrays = read_npz(path, _MOST_BYTES)
    try:
        positions, targets = arrays.pop("positions"), arrays.pop("targets")
    except KeyError as missing:
        raise InputError(f"{path}: has no array {missing}; expected positions and targets of hidden tokens") from None
    return HiddenTokens(arrays, positions, targets)


def measure_engines(
    bundles: Mapping[str, Bundle], bucket: Bucket, hidden: HiddenTokens, progress: Progress
) -> list[Measured]:
    """Every whole engine at ``bucket`` of all ``bundles`` (model name to bundle), in the order of their manifests.

    Raises InputError if the rows do not fill whole batches: with others beside it a row is routed otherwise.
    """
    rows = len(hidden.targets)
    if rows % bucket.batch:
        raise InputError(f"{rows} rows of hidden tokens: expected a multiple of the batch, {bucket.batch}")
    engines = [
        (name, bundle, engine)
        for name, bundle in bundles.items()
        for engine in bundle.manifest.engines
        if engine.bucket == bucket and engine.segment is None
    ]
    with ExitStack() as stack:
        threads = threads_or_default(None)
        runners = [stack.enter_context(runner_for(bundle, engine, "packed", threads)) for _, bundle, engine in engines]
        feeds = _batch(hidden, 0, bucket.batch)
        calls = [[partial(runner.run, feeds)] * _TIMED for runner in runners]
        times = time_in_turns(calls, progress, f"time in turns at {bucket.label}")
        found = []
        for number, ((name, bundle, engine), runner, taken) in enumerate(zip(engines, runners, times, strict=True)):
            progress(f"hidden tokens at {bucket.label}", number, len(engines))
            found.append(_measured(name, bundle, engine, runner, float(np.median(taken)), hidden))
        progress(f"hidden tokens at {bucket.label}", len(engines), len(engines))
    return found


def _measured(
    name: str, bundle: Bundle, engine: EngineEntry, runner: Runner, milliseconds: float, hidden: HiddenTokens
) -> Measured:
    entry = bundle.manifest.submodel(engine.submodel)
    outputs = [spec.name for spec in bundle.manifest.outputs]
    routing = [entry.name for entry in engine.routing or ()]
    batch, rows = engine.bucket.batch, len(hidden.targets)
    nats, right = 0.0, 0
    dropped = dict.fromkeys(routing, 0.0)
    for at in range(0, rows, batch):
        answer = runner.run(_batch(hidden, at, batch), routing=bool(routing))
        by_name = dict(zip([*outputs, *routing], answer, strict=True))
        targets = hidden.targets[at : at + batch]
        logits = np.take_along_axis(by_name["logits"], hidden.positions[at : at + batch, :, None], axis=1)  # [B, K, V]
        right += int((logits.argmax(-1) == targets).sum())
        logits = logits.reshape(-1, logits.shape[-1])
        nats += float(negative_log_likelihood(log_softmax(logits), targets.ravel()).sum())
        for routes in routing:
            dropped[routes] += batch / rows * dropped_share(by_name[routes], engine.bucket.tokens)
    return Measured(
        name,
        {kind: values[0] for kind, values in entry.values.items()},
        engine.bucket,
        int(engine.metadata["tokens per group"]) if engine.metadata else None,
        entry.parameters,
        engine.flops / batch,
        milliseconds / batch,
        right / hidden.targets.size,
        nats / hidden.targets.size,
        dropped,
    )


def dropped_share(routes: Array, tokens: int) -> float:
    """Share of ``tokens`` that no expert computed, by the ``routes`` of one layer: the tokens of each expert
    ``[G, K, C]``, or the expert of each token ``[G, T]``, -1 for none."""
    if routes.ndim == 2:
        return float((routes < 0).mean())
    return 1 - sum(len(np.unique(group)) for group in routes) / tokens


def _batch(hidden: HiddenTokens, at: int, rows: int) -> dict[str, Array]:
    return {name: np.ascontiguousarray(array[at : at + rows]) for name, array in hidden.inputs.items()}


CAPACITY, GROUP, EXPERTS = "moe.capacity_factor", "moe.group_size", "moe.experts"


def routers_table(found: Sequence[Measured], routed: Sequence[str], peer: str) -> Table:
    """Table 4: the models ``routed`` by their routers, at full budget, and how much faster than ``peer`` they are."""
    columns = ["router", "masked-token accuracy %", "loss nats", "tokens dropped %", "ms per row", "speed-up"]
    whole = _whole(found)
    rows = []
    for name in routed:
        one = whole[name]
        rows.append([name, *_quality(one), _dropped(one), f"{one.milliseconds:.3f}", _faster(one, whole[peer])])
    return Table(columns, rows)


def compute_table(found: Sequence[Measured], models: Sequence[str], fast: str, peer: str) -> Table:
    """Table 8: what a row costs in each of ``models``, in ``fast`` also at half its capacity, beside ``peer``."""
    columns = ["model", "MFLOP per row", "M parameters", "masked-token accuracy %", "ms per row", "speed-up"]
    whole = _whole(found)
    rows = []
    for name in models:
        rows.append(_compute_row(name, whole[name], whole[peer]))
        if name == fast:
            (half,) = (one for one in found if one.model == fast and _lowered(one, whole[fast]) == {CAPACITY: 50})
            rows.append(_compute_row(f"{name}, capacity 50 %", half, whole[peer]))
    return Table(columns, rows)


def capacity_table(found: Sequence[Measured], peer: str) -> Table:
    """Table 9: every model that routes, at each capacity and number of tokens that are routed together, with all its
    experts. Where a batch is no larger than several of the groups that were compiled, they are one row."""
    columns = [
        *("model", "capacity %", "group tokens", "masked-token accuracy %", "loss nats", "tokens dropped %"),
        *("MFLOP per row", "ms per row", "speed-up"),
    ]
    whole = _whole(found)
    budgets = {
        (one.model, one.group, one.values[CAPACITY]): one  # the last has the largest group
        for one in sorted(found, key=lambda one: one.values.get(GROUP, 0))
        if one.group is not None and EXPERTS not in _lowered(one, whole[one.model])
    }
    rows = []
    for model in dict.fromkeys(one.model for one in found):
        for (_, group, capacity), one in sorted(budgets.items(), reverse=True):
            if one.model == model:
                budget = [str(capacity), str(group)]
                rows.append([model, *budget, *_quality(one), _dropped(one), *_cost(one), _faster(one, whole[peer])])
    return Table(columns, rows)


def experts_table(found: Sequence[Measured], model: str) -> Table:
    """``model`` with fewer of its experts, all of them at the capacity and the group of training."""
    columns = [
        *("experts kept", "M parameters", "masked-token accuracy %", "loss nats", "tokens dropped %"),
        *("MFLOP per row", "ms per row"),
    ]
    whole = _whole(found)[model]
    rows = []
    for one in found:
        if one.model == model and _lowered(one, whole).keys() <= {EXPERTS}:
            facts = [str(one.values[EXPERTS]), f"{one.parameters / 1e6:.2f}"]
            rows.append([*facts, *_quality(one), _dropped(one), *_cost(one)])
    return Table(columns, rows)


def seeds_table(runs: Mapping[str, Mapping[str, float]]) -> Table:
    """Accuracy in percent of every training (name to accuracy by budget), as PyTorch measured it on the same rows."""
    budgets = list(dict.fromkeys(budget for run in runs.values() for budget in run))
    rows = [
        [name, *(f"{100 * run[budget]:.2f}" if budget in run else "-" for budget in budgets)]
        for name, run in runs.items()
    ]
    return Table(["training", *budgets], rows)


def heading(bucket: Bucket) -> str:
    """A bucket in words."""
    rows = "one row" if bucket.batch == 1 else f"{bucket.batch} rows"
    return f"{rows} of {bucket.sequence} tokens a run"


def _compute_row(name: str, one: Measured, peer: Measured) -> list[str]:
    flops, milliseconds = _cost(one)
    return [name, flops, f"{one.parameters / 1e6:.2f}", f"{100 * one.accuracy:.2f}", milliseconds, _faster(one, peer)]


def _whole(found: Sequence[Measured]) -> dict[str, Measured]:
    """The engine of every model with its full budget."""
    largest: dict[str, Measured] = {}
    for one in found:
        best = largest.get(one.model)
        if best is None or all(one.values[kind] >= value for kind, value in best.values.items()):
            largest[one.model] = one
    return largest


def _lowered(one: Measured, whole: Measured) -> dict[str, int]:
    """The values that are less than the full ones."""
    return {kind: value for kind, value in one.values.items() if value < whole.values[kind]}


def _quality(one: Measured) -> list[str]:
    return [f"{100 * one.accuracy:.2f}", f"{one.loss:.3f}"]


def _dropped(one: Measured) -> str:
    return f"{100 * sum(one.dropped.values()) / len(one.dropped):.1f}" if one.dropped else "-"


def _cost(one: Measured) -> list[str]:
    return [f"{one.flops / 1e6:.1f}", f"{one.milliseconds:.3f}"]


def _faster(one: Measured, peer: Measured) -> str:
    return f"{peer.milliseconds / one.milliseconds:.2f}"
