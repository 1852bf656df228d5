"""The calibrated chain against an early-exit loop in PyTorch eager, at equal thresholds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ... import load
from ...exporters.source import open_source
from ...exporters.universal import load_universal
from ...runtime.answer import Answer
from ...runtime.model import ElasticModel
from ..harness import Row, interleaved, ratio
from ..subjects import CORES
from .exit_subject import EXITS, exits_bundle, half_the_flops, model_folder, requests

_REQUESTS = {1: 100, 32: 10}
_ROUNDS = 7


def run() -> list[Row]:
    module: Any = load_universal(open_source(model_folder())).module.model
    torch.set_num_threads(CORES)
    with load(exits_bundle().path, residency="packed") as model:
        return [_row(model, module, batch) for batch in (1, 32)]


def _row(model: ElasticModel, module: Any, batch: int) -> Row:
    policy = half_the_flops().policy()
    asked = requests(model.bundle, batch, _REQUESTS[batch])
    tensors = [[torch.from_numpy(array) for array in feeds.values()] for feeds in asked]
    eager = [partial(_eager, module, inputs, policy.thresholds) for inputs in tensors]
    chain = [partial(model, feeds, exits=policy) for feeds in asked]
    same = sum(_equal_layers(theirs(), ours()) for theirs, ours in zip(eager, chain, strict=True))
    # In blocks with a pause between, as every benchmark here: threads of one still spin when the other begins.
    times = interleaved({"eager": partial(_all, eager), "chain": partial(_all, chain)}, _ROUNDS, runs=1)
    speed, rows = ratio(times, "eager", "chain"), batch * len(asked)
    return Row(
        f"calibrated chain against an eager early-exit loop, batch {batch}",
        f"{speed:.2f}x; {same} of {rows} rows leave at the same layer",
        ">= 2x" if batch == 1 else "works",
        speed >= 2 if batch == 1 else same >= 0.99 * rows,
        f"{len(asked)} requests of test texts at their own lengths, median of {_ROUNDS} rounds in turns; the loop "
        f"drops rows that left; {CORES} threads each",
    )


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _equal_layers(theirs: tuple[torch.Tensor, torch.Tensor], ours: Answer) -> int:
    assert ours.exits is not None
    return int((theirs[1].numpy() == ours.exits.layer).sum())


@torch.inference_mode()
def _eager(
    module: Any, tensors: list[torch.Tensor], thresholds: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[B, C]`` and layers ``[B]``: what people write, one segment after the other, rows that left dropped."""
    ids, mask, types = tensors
    hidden = module.embeddings(ids, types)
    logits = torch.empty(len(ids), module.architecture.exits.classes)
    layers = torch.full((len(ids),), EXITS[-1])
    live = torch.arange(len(ids))
    for first, last, threshold in zip((0, *EXITS), EXITS, (*thresholds, float("inf")), strict=False):
        hidden = module.states_from(hidden, mask, first, last)[-1]
        found, entropy = module.answer(last, hidden, mask)
        leaves = entropy <= threshold
        logits[live[leaves]], layers[live[leaves]] = found[leaves], last
        if bool(leaves.all()):
            break
        if bool(leaves.any()):
            hidden, mask, live = hidden[~leaves], mask[~leaves], live[~leaves]
    return logits, layers
