"""Rotary positions of queries and keys as one operator, ``RotaryEmbedding``, by the angles that the model computes.

``x * cos + rotate_half(x) * sin`` on ``[B, heads, S, D]`` (Su et al. 2021, section 3.4.2, in the order of GPT-NeoX),
between two transposes, is the operator on ``[B, S, heads * D]``. It looks angles up by position; here they are those of
the new tokens, ``[B * S, D / 2]``, in their order, so that every kind of positions stays what the model computes.

Requires: shapes known. Ensures: the same function; queries and keys whose positions are made in another way, or whose
angles are not those of every row and token, are left. Nodes left unused stay for the caller's dead-code removal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from ..dims_by_operator import CACHED_ATTENTION
from ..extents import extents, int64_constant, product
from ..matching import producer, replace, scalar

_MICROSOFT = "com.microsoft"
_ANGLES = frozenset({"Cos", "Sin"})


def fuse_rotary(model: ir.Model) -> bool:
    """Rewrites queries and keys of every attention over a cache."""
    places: ir.Value | None = None
    halves: dict[ir.Value, ir.Value] = {}
    changed = False
    for node in list(model.graph):
        for index in (0, 1) if node.op_type == CACHED_ATTENTION else ():
            found = _turned(node, index)
            if found is None or not _fits(found, model.graph.inputs[0]):
                continue
            if places is None:
                places = _places(model.graph, found.cos)
            angles = [_half(halves, values) for values in (found.cos, found.sin)]
            _fuse(found, places, angles)
            changed = True
    return changed


class _Turned(NamedTuple):
    """``flat`` makes ``[B, S, heads * D]`` of ``x`` ``[B, S, heads, D]``, turned by ``cos`` and ``sin`` [B, S, D]."""

    flat: ir.Node
    x: ir.Value
    cos: ir.Value
    sin: ir.Value


def _turned(attention: ir.Node, index: int) -> _Turned | None:
    flat = producer(attention, index, "Reshape")
    total = producer(_heads_swapped(producer(flat, 0, "Transpose")), 0, "Add")
    straight, crossed = producer(total, 0, "Mul"), producer(total, 1, "Mul")
    if flat is None or straight is None or crossed is None:
        return None
    x, cos, sin = straight.inputs[0], _of_all_heads(straight), _of_all_heads(crossed)
    swapped = _heads_swapped(producer(straight, 0, "Transpose"))
    if x is None or cos is None or sin is None or swapped is None or not _is_rotated(producer(crossed, 0, "Concat"), x):
        return None
    heads = swapped.inputs[0]
    return None if heads is None else _Turned(flat, heads, cos, sin)


def _fits(found: _Turned, ids: ir.Value) -> bool:
    """Whether there are angles for each of the tokens ``ids`` ``[B, S]``: the operator reads them by their numbers."""
    tokens, dims = extents(ids), extents(found.x)
    if tokens is None or dims is None or len(tokens) != 2 or dims[:2] != tokens:
        return False
    angles = (*tokens, dims[3])
    flat = (*tokens, product(dims[2:]))
    return extents(found.cos) == extents(found.sin) == angles and extents(found.flat.outputs[0]) == flat


def _heads_swapped(node: ir.Node | None) -> ir.Node | None:
    """``node`` where it exchanges the heads and the tokens of four dimensions."""
    permutation = None if node is None else node.attributes.get_ints("perm")
    return node if permutation is not None and tuple(permutation) == (0, 2, 1, 3) else None


def _of_all_heads(product: ir.Node) -> ir.Value | None:
    """The cosines or sines ``[B, S, D]`` of a product with every head, if both halves of them are the same."""
    spread = producer(product, 1, "Unsqueeze")
    values = None if spread is None or scalar(spread.inputs[1]) != 1 else spread.inputs[0]
    node = None if values is None else values.producer()
    while node is not None and node.op_type in {*_ANGLES, "Mul"} and node.inputs[0] is not None:
        if node.op_type == "Mul" and scalar(node.inputs[1]) is None:
            return None
        node = node.inputs[0].producer()
    twice = node is not None and node.op_type == "Concat" and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    return values if twice and node is not None and node.attributes.get_int("axis") in (-1, 2) else None


def _is_rotated(joined: ir.Node | None, x: ir.Value) -> bool:
    """Whether ``joined`` is the second half of ``x`` in its last dimension, negated, and the first behind it."""
    dims = extents(x)
    second, first = producer(producer(joined, 0, "Neg"), 0, "Slice"), producer(joined, 1, "Slice")
    if dims is None or joined is None or not isinstance(dims[-1], int) or dims[-1] % 2:
        return False
    is_last = joined.attributes.get_int("axis") in (-1, 3)
    middle = dims[-1] // 2
    return is_last and _is_slice(second, x, middle, dims[-1]) and _is_slice(first, x, 0, middle)


def _is_slice(node: ir.Node | None, x: ir.Value, start: int, stop: int) -> bool:
    """Whether ``node`` takes ``start`` to ``stop`` of the last dimension, ``stop`` being its end or not."""
    if node is None or node.inputs[0] is not x or len(node.inputs) < 4:
        return False
    first, last, axis = (scalar(value) for value in node.inputs[1:4])
    step = scalar(node.inputs[4]) if len(node.inputs) > 4 else 1
    shape = extents(x) or ()
    stops = last == stop or (last is not None and stop == shape[-1] and last >= stop)
    return first == start and stops and axis in (-1, len(shape) - 1) and step == 1


def _places(graph: ir.Graph, cos: ir.Value) -> ir.Value:
    """The numbers 0, 1, ... of the new tokens ``[B, S]``, made before all that reads ``cos``."""
    ids = graph.inputs[0]
    shape = ir.node("Shape", [ids])
    zero, one = (ir.node("Constant", [], {"value": ir.tensor(np.array(value, np.int64))}) for value in (0, 1))
    count = ir.node("Size", [ids])
    numbers = ir.node("Range", [zero.outputs[0], count.outputs[0], one.outputs[0]])
    places = ir.node("Reshape", [numbers.outputs[0], shape.outputs[0]])
    places.outputs[0].shape, places.outputs[0].type = ids.shape, ids.type
    maker = cos.producer()
    assert maker is not None
    maker.append([shape, zero, one, count, numbers, places])
    return places.outputs[0]


def _half(known: dict[ir.Value, ir.Value], values: ir.Value) -> ir.Value:
    """The first half of cosines or sines ``[B, S, D]``, as ``[B * S, D / 2]``."""
    if values not in known:
        dims, maker = extents(values), values.producer()
        assert dims is not None
        assert maker is not None
        assert isinstance(dims[-1], int)
        bounds = [int64_constant([number]) for number in (0, dims[-1] // 2, len(dims) - 1)]
        half = ir.node("Slice", [values, *(bound.outputs[0] for bound in bounds)])
        flat = ir.node("Flatten", half.outputs, {"axis": len(dims) - 1})
        maker.append([*bounds, half, flat])
        known[values] = flat.outputs[0]
    return known[values]


def _fuse(found: _Turned, places: ir.Value, angles: list[ir.Value]) -> None:
    """Puts the operator behind the Reshape, which now comes first."""
    flat = ir.node("Reshape", [found.x, found.flat.inputs[1]])
    before, after = flat.outputs[0], found.flat.outputs[0]
    before.shape, before.type = after.shape, after.type
    turned = ir.node("RotaryEmbedding", [before, places, *angles], domain=_MICROSOFT)
    found.flat.prepend([flat, turned])
    replace(after, turned.outputs[0])
