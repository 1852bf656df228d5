"""Answers of compiled models with conditional adapters to images, and how long that takes.

All is asked of the runtime, and all that is timed takes turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...bucket import Bucket
from ...progress import Progress
from ...runtime.calibrate.measure import time_in_turns
from ...runtime.inputs.arrays import Array
from ...runtime.model import ElasticModel
from ...runtime.summary import Table

_TIMED = 8  # requests in one turn


@dataclass(frozen=True, eq=False)
class Asked:
    """Requests of one kind: one ``task`` of a ``model`` at one ``submodel``, for ``images`` [N, C, H, W] of classes
    ``labels`` [N]."""

    model: ElasticModel
    submodel: str
    task: str
    images: Array
    labels: Array

    def __call__(self, start: int, stop: int) -> Array:
        """Logits [M, classes] of the images from ``start`` to ``stop``."""
        answer = self.model({"pixel_values": self.images[start:stop]}, submodel=self.submodel, task=self.task)
        return answer.outputs["logits"]


def accuracy(asked: Asked, batch: int) -> float:
    """Share of the images whose highest logit is right, ``batch`` a request."""
    found = [asked(at, min(at + batch, len(asked.images))) for at in range(0, len(asked.images), batch)]
    return float((np.concatenate(found).argmax(-1) == asked.labels).mean())


def milliseconds(asked: Sequence[Asked], buckets: Sequence[Bucket], progress: Progress) -> list[list[float]]:
    """The median of a request of each kind that fills each of ``buckets``."""
    found: list[list[float]] = [[] for _ in asked]
    for bucket in buckets:
        calls = [[partial(one, 0, bucket.batch)] * _TIMED for one in asked]
        times = time_in_turns(calls, progress, f"time in turns at batch {bucket.batch}")
        for taken, row in zip(times, found, strict=True):
            row.append(float(np.median(taken)))
    return found


KEYS_NAMES = {"selected": "k-to-k", "all": "k-to-all"}


@dataclass(frozen=True)
class Measured:
    """A model at one reduction: tokens of a row that a layer computes, multiply-adds of a row as the cost model counts
    them, and of each bucket milliseconds."""

    keys_of: str
    reduction: int
    tokens: int
    accuracy: float
    macs: int
    milliseconds: tuple[float, ...]


def quality_table(found: Sequence[Measured], buckets: Sequence[Bucket]) -> Table:
    """A row for each reduction of each kind of keys; ratios are to the same kind at r = 1, the dense adapter model."""
    whole = {one.keys_of: one for one in found if one.reduction == 1}
    columns = ["attention", "r", "tokens", "accuracy", "M multiply-adds", "fewer"]
    for bucket in buckets:
        columns += [f"ms, batch {bucket.batch}", "faster"]
    rows = []
    for one in found:
        base = whole[one.keys_of]
        row = [KEYS_NAMES[one.keys_of], str(one.reduction), str(one.tokens), f"{one.accuracy:.1%}"]
        row += [f"{one.macs / 1e6:.2f}", f"{base.macs / one.macs:.2f}x"]
        for own, dense in zip(one.milliseconds, base.milliseconds, strict=True):
            row += [f"{own:.3f}", f"{dense / own:.2f}x"]
        rows.append(row)
    return Table(columns, rows)


def routing_table(by_keys: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """A row for each reduction at which layers choose, with figures of each layer from the first to the last."""
    columns = ["attention", "r", "mean gate, by layer", "gates below 1e-6", "chosen pixels with ink, by layer"]
    rows = []
    for keys_of, reductions in by_keys.items():
        for figures in reductions:
            if layers := figures["layers"]:
                vanished = sum(layer["gates_vanished"] for layer in layers) / len(layers)
                gates = " ".join(f"{layer['mean_gate']:.2f}" for layer in layers)
                ink = " ".join(f"{layer['ink']:.0%}" for layer in layers)
                rows.append([KEYS_NAMES[keys_of], str(figures["reduction"]), gates, f"{vanished:.1%}", ink])
    return Table(columns, rows)
