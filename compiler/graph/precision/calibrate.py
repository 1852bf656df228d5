"""Statistics of a model's values before it can have a precision, seen by running its float32 engine.

int8 needs a scale of the input of every quantised product: the one that leaves the least squared error over a histogram
of magnitudes. Few values are far larger than the rest, and what clipping costs them the many others gain. Where queries
and keys are made nothing is clipped, though. There the large values are one channel of every token, and a softmax makes
much of what clipping does to their differences: on all-MiniLM-L6-v2 the sentence embedding's mean cosine to float32 is
0.991 so, 0.979 where all are clipped, and 0.982 where none is.

float16 needs every value within its range.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import frexp, prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from ....errors import BuildError
from ....profiles.precision import FP16
from ....progress import tell
from ....runtime.inputs.arrays import Arrays
from .fp32_nodes import MOVEMENT, FloatGraph, element_types
from .quantize import products

_HISTOGRAM_BINS = 4096
_INT8_MAX = 127
# Clipping: scales down to this part of the one that clips nothing are tried.
_MIN_SCALE_SHARE = 0.2
_SCALES_TRIED = 81
_FLOAT16_MAX = float(np.finfo(np.float16).max)
# Bytes of values that one session returns; what is more is left to another.
_PART_BYTES = 64 << 20
_ELEMENT_BYTES = 4


def require_finite(array: np.ndarray, weight: str) -> None:
    """Raises BuildError if the input ``array`` of ``weight`` has NaN or infinity."""
    if not np.isfinite(array).all():
        problem = "is not finite for an example; leave out what the float32 engine cannot answer"
        raise BuildError(f"calibration: the input of {weight} {problem}")


def calibrate(
    graph: onnx.ModelProto,
    folder: Path,
    feeds: Sequence[Arrays],
    in_fp32: Collection[str],
    counted: Sequence[np.ndarray] | None = None,
) -> dict[str, float]:
    """The scale of the input of each weight, by the weight's name: ``real = scale * int8``.

    ``graph`` is an emitted float32 engine whose weights lie in ``folder``, and ``feeds`` are examples at its bucket;
    ``counted`` bool ``[B, S]``, one for each, says which positions are theirs: padding has no say.
    By weight, since segments and other buckets read the same ones; two products of one weight share a scale.
    Products that make ``in_fp32`` are left out. Raises BuildError if an input is 0 in every example, or is not finite.
    """
    found = list(products(graph.graph, in_fp32).values())
    weights = {product.x: product.weight for product in found}
    seen = {value: Magnitudes() for value in weights}

    def see(value: str, array: np.ndarray, number: int) -> None:
        require_finite(array, weights[value])
        seen[value].see(array if counted is None else counted_rows(array, counted[number]))

    observe(graph, folder, list(seen), feeds, see)
    joined: dict[str, Magnitudes] = {}
    for product in found:
        joined.setdefault(product.weight, Magnitudes()).join(seen[product.x])
    for weight, magnitudes in joined.items():
        if not magnitudes.largest:
            raise BuildError(
                f"calibration: the input of {weight} is 0 in every example, so it has no int8 scale; "
                "add examples that reach this layer, or choose another precision"
            )
    compared = _compared(graph)
    whole = {product.x for product in found if product.output in compared}  # one scale for all that read a value
    unclipped = {product.weight for product in found if product.x in whole}
    return {
        weight: magnitudes.whole_scale() if weight in unclipped else magnitudes.scale()
        for weight, magnitudes in joined.items()
    }


def overflowing(
    graph: onnx.ModelProto, proto16: onnx.ModelProto, folder: Path, feeds: Sequence[Arrays]
) -> dict[str, float]:
    """The largest magnitude of each value that ``proto16`` holds in float16 and that leaves its range on ``feeds``:
    weights, then what is computed, in the order of the graph.

    ``graph`` is the emitted float32 engine, whose weights lie in ``folder``. A value that is not finite there is beyond
    any limit.
    """
    held = {name.removesuffix(FP16) for name, kind in element_types(proto16).items() if kind == TensorProto.FLOAT16}
    largest = {
        tensor.name: _largest_weight(tensor, folder)
        for tensor in graph.graph.initializer
        if tensor.name in held and tensor.data_location == TensorProto.EXTERNAL
    }
    inputs = [value.name for value in graph.graph.input]
    made = [name for node in graph.graph.node if node.op_type not in MOVEMENT for name in node.output]
    scanned = {f"{name}.largest": name for name in (*inputs, *made) if name in held}
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
    return {name: size for name, size in largest.items() if size > _FLOAT16_MAX}


def observe(
    graph: onnx.ModelProto,
    folder: Path,
    names: Sequence[str],
    feeds: Sequence[Arrays],
    see: Callable[[str, np.ndarray, int], None],
) -> None:
    """Calls ``see(name, array, number)`` for each of ``names`` (values of the graph, or inputs of it) and each of
    ``feeds``; ``number`` says which.

    ``graph`` is an emitted engine whose weights lie in ``folder``, where it is written for as long as this takes.
    Memory stays bounded: many or large values are returned by several sessions, one after the other. Each run is told
    (``progress.tell``).
    """
    inputs = {value.name for value in graph.graph.input}
    for name in inputs.intersection(names):
        for number, arrays in enumerate(feeds):
            see(name, arrays[name], number)
    parts = list(_parts(graph, [name for name in dict.fromkeys(names) if name not in inputs]))
    for before, part in enumerate(parts):
        session = _session(graph, folder, part)
        path = onnxruntime.RunOptions()
        path.only_execute_path_to_fetches = True  # nothing behind the last of them
        for number, arrays in enumerate(feeds):
            tell(before * len(feeds) + number, len(parts) * len(feeds))
            for name, array in zip(part, session.run(part, dict(arrays), path), strict=True):
                see(name, array, number)


class Magnitudes:
    """How often each magnitude was seen: equal bins from 0 to ``limit``, a power of two.

    A larger one doubles the limit by merging bins in pairs, so that any number of arrays is seen once, in any order.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_HISTOGRAM_BINS, np.int64)
        self.limit = 0.0
        self.largest = 0.0

    def see(self, array: np.ndarray) -> None:
        """Counts the values of ``array`` but for zeros, which every scale keeps."""
        magnitudes = np.abs(array).reshape(-1)
        largest = float(magnitudes.max(initial=0))
        if not largest:
            return
        self._reach(largest)
        bins = (magnitudes * (_HISTOGRAM_BINS / self.limit)).astype(np.intp)  # exact: both are powers of two
        self.counts += np.bincount(bins, minlength=_HISTOGRAM_BINS)
        self.counts[0] -= magnitudes.size - np.count_nonzero(magnitudes)
        self.largest = max(self.largest, largest)

    def join(self, other: Magnitudes) -> None:
        """Counts what ``other`` has seen."""
        if other.largest:
            self._reach(other.largest)
            other._reach(self.largest)
            self.counts += other.counts
            self.largest = max(self.largest, other.largest)

    def whole_scale(self) -> float:
        """The least scale of int8, zero point 0, that clips nothing."""
        return float(np.float32(self.largest / _INT8_MAX))

    def scale(self) -> float:
        """The scale of int8, zero point 0, with the least squared error; of equal ones that which clips least."""
        seen = np.flatnonzero(self.counts)
        values = (seen + 0.5) * (self.limit / _HISTOGRAM_BINS)
        tried = np.linspace(1.0, _MIN_SCALE_SHARE, _SCALES_TRIED) * (self.largest / _INT8_MAX)
        integers = np.minimum(np.rint(values / tried[:, None]), _INT8_MAX)
        errors = np.square(integers * tried[:, None] - values) @ self.counts[seen]
        return float(np.float32(tried[errors.argmin()]))

    def _reach(self, largest: float) -> None:
        """Makes ``limit`` the least power of two above all that was seen and ``largest``."""
        if not self.limit:
            self.limit = 2.0 ** frexp(largest)[1]
        while largest >= self.limit:
            self.counts = np.concatenate(
                [self.counts.reshape(-1, 2).sum(axis=1), np.zeros(_HISTOGRAM_BINS // 2, np.int64)]
            )
            self.limit *= 2


def counted_rows(array: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """The rows of ``array`` that stand for positions which count; all of one that has no row for each position."""
    if array.ndim > 2 and array.shape[:2] == counted.shape:
        chosen: np.ndarray = array[counted]
    else:
        chosen = array[counted.reshape(-1)] if array.shape[:1] == (counted.size,) else array
    return chosen


def _compared(proto: onnx.ModelProto) -> set[str]:
    """Outputs of the Gemms that are nearest before a Softmax, with nothing but products of computed values between."""
    graph = FloatGraph(proto)

    def passes(node: onnx.NodeProto) -> bool:
        return node.op_type != "Gemm" and not (node.op_type == "MatMul" and graph.constants.intersection(node.input))

    softmaxes = [node.input[0] for node in proto.graph.node if node.op_type == "Softmax"]
    return {node.output[0] for node in graph.behind(softmaxes, passes) if node.op_type == "Gemm"}


def _largest_weight(tensor: onnx.TensorProto, folder: Path) -> float:
    place = {entry.key: entry.value for entry in tensor.external_data}
    weights = np.memmap(folder / place["location"], np.float32, "r", int(place["offset"]), tuple(tensor.dims))
    return max(_size(weights.max()), _size(weights.min()))


def _size(number: np.ndarray | np.floating[Any]) -> float:
    return float(abs(number)) if np.isfinite(number) else float("inf")


def _parts(graph: onnx.ModelProto, names: Sequence[str]) -> Iterator[list[str]]:
    """``names`` in groups whose values take at most _PART_BYTES together, or that hold one value."""
    known = onnx.shape_inference.infer_shapes(graph).graph
    shapes = {value.name: value.type.tensor_type.shape for value in (*known.value_info, *known.output)}
    part: list[str] = []
    total = 0
    for name in names:
        extents = [dim.dim_value for dim in shapes[name].dim] if name in shapes else [_PART_BYTES]
        size = prod(extents) * _ELEMENT_BYTES
        if part and total + size > _PART_BYTES:
            yield part
            part, total = [], 0
        part.append(name)
        total += size
    if part:
        yield part


def _session(graph: onnx.ModelProto, folder: Path, outputs: Iterable[str]) -> onnxruntime.InferenceSession:
    """A session of the graph, weights mapped, that returns ``outputs``; its file is gone again."""
    model = onnx.ModelProto()
    model.CopyFrom(graph)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    path = folder / "observe.onnx"
    try:
        path.write_bytes(model.SerializeToString())
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    finally:
        path.unlink(missing_ok=True)
