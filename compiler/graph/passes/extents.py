"""Extents of values: numbers, and names of dimensions that the graph leaves free (``batch``, ``sequence``)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ....errors import SliceError

# A number, the name of a free dimension, or a product such as ``batch*sequence``.
Extent = int | str
_TIMES = "*"
# Anything else, such as a sum, is one factor.
_PRODUCT = re.compile(r"\w+( ?\* ?\w+)*", re.ASCII)


def extents(value: ir.Value | None) -> tuple[Extent, ...] | None:
    """The extents of ``value``, or None where one of them is not known."""
    if value is None or value.shape is None:
        return None
    dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return None if any(dim is None for dim in dims) else tuple(dim for dim in dims if dim is not None)


def factors(extent: Extent) -> tuple[Extent, ...]:
    """What ``extent`` is the product of, slowest first."""
    if isinstance(extent, int) or not _PRODUCT.fullmatch(extent):
        return (extent,)
    return tuple(int(part) if part.isdecimal() else part for part in extent.replace(" ", "").split(_TIMES))


def product(dims: Sequence[Extent]) -> Extent:
    """All of ``dims`` as one dimension, whose factors stay in order: ``(batch, 5, 8)`` is ``batch*40``."""
    parts: list[Extent] = []
    for factor in (factor for dim in dims for factor in factors(dim) if factor != 1):
        last = parts[-1] if parts else None
        if isinstance(factor, int) and isinstance(last, int):
            parts[-1] = last * factor
        else:
            parts.append(factor)
    if not parts:
        return 1
    return parts[0] if len(parts) == 1 else _TIMES.join(map(str, parts))


def shape_of(dims: Sequence[Extent]) -> ir.Shape:
    return ir.Shape(list(dims))


def reshape_target(graph: ir.Graph, dims: Sequence[Extent], beside: Sequence[ir.Value] = ()) -> list[ir.Node]:
    """Nodes that make the target ``dims`` of a Reshape, the last of them the target itself.

    A free dimension is read from an input of the graph that has it, or from a value that is computed ``beside``; -1
    stands for one that follows from the rest. Raises SliceError where none has it.
    """
    if all(isinstance(dim, int) for dim in dims):
        return [int64_constant([dim for dim in dims if isinstance(dim, int)])]
    nodes: list[ir.Node] = []
    for dim in dims:
        if isinstance(dim, int):
            nodes.append(int64_constant([dim]))
            continue
        source, index = _value_with([*graph.inputs, *beside], dim)
        size = ir.node("Shape", [source], attributes={"start": index, "end": index + 1})
        size.outputs[0].shape, size.outputs[0].type = ir.Shape([1]), ir.TensorType(ir.DataType.INT64)
        nodes.append(size)
    target = ir.node("Concat", [node.outputs[0] for node in nodes], attributes={"axis": 0})
    target.outputs[0].shape, target.outputs[0].type = ir.Shape([len(dims)]), ir.TensorType(ir.DataType.INT64)
    return [*nodes, target]


def int64_constant(values: Sequence[int]) -> ir.Node:
    """A Constant node holding an int64 vector, with its type and shape known."""
    node = ir.node("Constant", [], attributes={"value": ir.tensor(np.array(values, np.int64))})
    node.outputs[0].shape = ir.Shape([len(values)])
    node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    return node


def _value_with(values: Sequence[ir.Value], dim: str) -> tuple[ir.Value, int]:
    for value in values:
        for index, extent in enumerate(extents(value) or ()):
            if extent == dim:
                return value, index
    raise SliceError(f"no input of the graph has a dimension {dim}; ask for static buckets")
