"""Quality beside cost at every reduction, and what the routers choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....bucket import Bucket
from ....runtime.summary.table import Table

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
