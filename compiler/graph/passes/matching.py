"""Shared by the passes: patterns of nodes, and extents of values.

An extent is a number, or the name of a dimension that the graph leaves free (``batch``, ``sequence``), or a product of
both, such as ``batch*40``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ....errors import SliceError

# A number, the name of a free dimension, or a product such as ``batch*sequence``.
Extent = int | str
_TIMES = "*"
# Anything else, such as a sum, is one factor.
_PRODUCT = re.compile(r"\w+( ?\* ?\w+)*", re.ASCII)
_INT64 = ir.TensorType(ir.DataType.INT64)


def producer(node: ir.Node | None, index: int, kind: str) -> ir.Node | None:
    """The node of ``kind`` that makes input ``index`` of ``node``; None where it is another or there is none."""
    value = node.inputs[index] if node is not None and index < len(node.inputs) else None
    found = value.producer() if value is not None else None
    return found if found is not None and found.op_type == kind else None


def constant(node: ir.Node, index: int) -> np.ndarray | None:
    """The numbers that input ``index`` of ``node`` always is; None where it is computed or absent."""
    value = node.inputs[index] if index < len(node.inputs) else None
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def scalar(value: ir.Value | None) -> float | None:
    """The number that ``value`` always is, or None."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def is_permuted(node: ir.Node | None, permutation: Sequence[int]) -> bool:
    """Whether ``node`` is a Transpose by ``permutation``."""
    found = None if node is None or node.op_type != "Transpose" else node.attributes.get_ints("perm")
    return found is not None and tuple(found) == tuple(permutation)


def is_last(axis: float | None, value: ir.Value | None) -> bool:
    """Whether ``axis`` is the last dimension of ``value``."""
    return axis in (-1, len(extents(value) or ()) - 1)


def last_extent(value: ir.Value | None) -> int:
    """The extent of the last dimension; 0 where it is no number."""
    last = (extents(value) or (0,))[-1]
    return last if isinstance(last, int) else 0


def sliced(node: ir.Node | None, value: ir.Value | None) -> tuple[float, float] | None:
    """Where in the last dimension of ``value`` what ``node`` takes of it begins and ends; None where ``node`` is no
    Slice of that."""
    if node is None or node.op_type != "Slice" or node.inputs[0] is not value or len(node.inputs) < 4:
        return None
    begin, end, axis, *step = (scalar(given) for given in node.inputs[1:])
    if begin is None or end is None or not is_last(axis, value) or step not in ([], [1]):
        return None
    return begin, min(end, last_extent(value))


def replace(value: ir.Value, result: ir.Value) -> None:
    """Makes ``result``, of a node that is in the graph, what ``value`` was: under its name, for all that read it."""
    result.name, result.shape, result.type = value.name, value.shape, value.type
    ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)


def new_weight(
    graph: ir.Graph, name: str, shape: Sequence[int], dtype: ir.DataType, numbers: Callable[[], np.ndarray]
) -> ir.Value:
    """An initializer made of others, whose ``numbers`` are computed when the weight store is written."""
    dims = ir.Shape(shape)
    lazy = ir.LazyTensor(lambda: ir.Tensor(numbers(), name=name), dtype=dtype, shape=dims, name=name)
    value = ir.Value(name=name, shape=dims, type=ir.TensorType(dtype), const_value=lazy)
    graph.register_initializer(value)
    return value


def typed_node(
    kind: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
    dims: Sequence[Extent],
    of_type: ir.TypeProtocol | None = _INT64,
) -> ir.Node:
    """A node whose output has these extents and this type."""
    node = ir.node(kind, inputs, attributes)
    node.outputs[0].shape, node.outputs[0].type = ir.Shape(list(dims)), of_type
    return node


def int64_constant(values: Sequence[int]) -> ir.Node:
    """A Constant node holding an int64 vector."""
    return typed_node("Constant", [], {"value": ir.tensor(np.array(values, np.int64))}, [len(values)])


def extents(value: ir.Value | None) -> tuple[Extent, ...] | None:
    """The extents of ``value``, or None where one of them is not known."""
    if value is None or value.shape is None:
        return None
    dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return None if any(dim is None for dim in dims) else tuple(dim for dim in dims if dim is not None)


def factors(extent: Extent) -> tuple[Extent, ...]:
    """Factors of ``extent``, slowest first."""
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
        nodes.append(typed_node("Shape", [source], {"start": index, "end": index + 1}, [1]))
    return [*nodes, typed_node("Concat", [node.outputs[0] for node in nodes], {"axis": 0}, [len(dims)])]


def _value_with(values: Sequence[ir.Value], dim: str) -> tuple[ir.Value, int]:
    for value in values:
        for index, extent in enumerate(extents(value) or ()):
            if extent == dim:
                return value, index
    raise SliceError(f"no input of the graph has a dimension {dim}; ask for static buckets")
