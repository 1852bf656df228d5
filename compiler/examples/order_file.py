"""``ranking.safetensors``: where each step of a ranked model lies in its checkpoint, so that anyone can check a slice.

One int32 tensor ``[n]`` per order that was permuted: step ``i`` of the bundle is step ``places[i]`` of the checkpoint.
The header says which parameters have those steps, and where. See docs/bundle-format.md, section 3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ...elastic import ElasticSpec
from ..graph.store import save_tensors

SLICES = "slices"


def permuted(places: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The orders that moved a step, as the file holds them; what it leaves out is as in the checkpoint."""
    arrays = {name: order.numpy().astype(np.int32) for name, order in places.items()}
    return {name: order for name, order in arrays.items() if (order != np.arange(len(order))).any()}


def save_orders(moved: Mapping[str, np.ndarray], spec: ElasticSpec, path: Path) -> None:
    """Writes ``moved``, and in the header, as JSON by parameter, every dimension that lies in one of these orders: its
    ``dim`` as the checkpoint has it, the ``order``, and how many elements a step has (``unit``)."""
    slices: dict[str, list[dict[str, int | str]]] = {}
    for order in spec.orders:
        for cut in (*order.slices, *order.followers) if order.name in moved else ():
            slices.setdefault(cut.parameter, []).append({"dim": cut.dim, "order": order.name, "unit": cut.unit})
    # One entry: safetensors writes several in an order of its own.
    save_tensors(moved, path, {SLICES: json.dumps(slices, sort_keys=True)})
