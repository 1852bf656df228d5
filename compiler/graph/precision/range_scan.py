"""Which values of a model leave the range of float16, found by running the float32 engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ....profiles.precision import FP16
from ....runtime.inputs.arrays import Arrays
from .fp32_nodes import MOVEMENT, element_types
from .observe import observe

_MAGNITUDE_SUFFIX = ".largest"
_FLOAT16_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Overflow:
    """A value of the float32 graph, or a weight, whose ``largest`` magnitude is beyond ``limit``."""

    value: str
    largest: float
    limit: float = _FLOAT16_MAX


def overflowing(
    graph: onnx.ModelProto, proto16: onnx.ModelProto, folder: Path, feeds: Iterable[Arrays]
) -> list[Overflow]:
    """The values that ``proto16`` holds in float16 and that leave its range on ``feeds``: weights, then what is
    computed, in the order of the graph.

    ``graph`` is the emitted float32 engine, whose weights lie in ``folder``. What is not finite there is beyond any
    limit.
    """
    held = {name.removesuffix(FP16) for name, kind in element_types(proto16).items() if kind == TensorProto.FLOAT16}
    largest = {
        tensor.name: _largest_weight(tensor, folder)
        for tensor in graph.graph.initializer
        if tensor.name in held and tensor.data_location == TensorProto.EXTERNAL
    }
    inputs = [value.name for value in graph.graph.input]
    made = [name for node in graph.graph.node if node.op_type not in MOVEMENT for name in node.output]
    scanned = {f"{name}{_MAGNITUDE_SUFFIX}": name for name in (*inputs, *made) if name in held}
    measured = onnx.ModelProto()
    measured.CopyFrom(graph)
    for largest_name, name in scanned.items():
        sizes = f"{name}.sizes"
        measured.graph.node.append(helper.make_node("Abs", [name], [sizes]))
        measured.graph.node.append(helper.make_node("ReduceMax", [sizes], [largest_name], keepdims=0))

    def see(largest_name: str, found: np.ndarray, _number: int) -> None:
        name = scanned[largest_name]
        largest[name] = max(largest.get(name, 0.0), _size(found))

    observe(measured, folder, list(scanned), feeds, see)
    return [Overflow(name, size) for name, size in largest.items() if size > _FLOAT16_MAX]


def _largest_weight(tensor: onnx.TensorProto, folder: Path) -> float:
    place = {entry.key: entry.value for entry in tensor.external_data}
    weights = np.memmap(folder / place["location"], np.float32, "r", int(place["offset"]), tuple(tensor.dims))
    return max(_size(weights.max()), _size(weights.min()))


def _size(number: np.ndarray | np.floating[Any]) -> float:
    return float(abs(number)) if np.isfinite(number) else float("inf")
