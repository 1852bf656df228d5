"""Compiled masked-token models on rows that nothing was trained on: accuracy, routes, and what they cost.

Everything is asked of the runtime, and every engine of one batch takes turns with all others.
"""

from __future__ import annotations

from collections.abc import Mapping
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
