"""Rotary positions of queries and keys as one operator, ``RotaryEmbedding``, by the angles that the model computes.

For heads that attention over a cache does not turn itself (``turn_in_attention``). The operator takes ``[B, S, heads *
D]`` and looks angles up by position; here they are those of the new tokens, ``[B * S, D / 2]``, in their order, so that
every kind of positions stays what the model computes.

Requires: shapes known. Ensures: the same function; queries and keys whose positions are made in another way, or whose
angles are not those of every row and token, are left. Nodes left unused stay for the caller's dead-code removal.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..dims_by_operator import CACHED_ATTENTION
from ..extents import extents, int64_constant
from ..matching import replace, scalar
from .turned_heads import TurnedHeads, heads_by_token, turned_heads

_MICROSOFT = "com.microsoft"
_ANGLES = frozenset({"Cos", "Sin"})


def fuse_rotary(model: ir.Model) -> bool:
    """Rewrites queries and keys of every attention over a cache."""
    places: ir.Value | None = None
    halves: dict[ir.Value, ir.Value] = {}
    changed = False
    for node in list(model.graph):
        for index in (0, 1) if node.op_type == CACHED_ATTENTION else ():
            found = turned_heads(node, index)
            angles = None if found is None else _angles(found)
            if found is None or angles is None or extents(model.graph.inputs[0]) != found.dims[:2]:
                continue  # the operator reads angles by the numbers of the tokens that the graph is given
            if places is None:
                places = _places(model.graph, angles[0])
            _fuse(found, places, [_half(halves, values) for values in angles])
            changed = True
    return changed


def _angles(found: TurnedHeads) -> list[ir.Value] | None:
    """Cosines and sines ``[B, S, D]`` of ``found``, if both halves of them are the same."""
    values = [_of_all_heads(spread, found) for spread in (found.cos, found.sin)]
    known = [value for value in values if value is not None]
    return known if len(known) == 2 and not found.is_signed else None


def _of_all_heads(spread: ir.Value, found: TurnedHeads) -> ir.Value | None:
    node = spread.producer()
    values = node.inputs[0] if node is not None and node.op_type == "Unsqueeze" else None
    rows, tokens, _, size = found.dims
    if values is None or extents(values) != (rows, tokens, size):
        return None
    node = values.producer()
    while node is not None and node.op_type in {*_ANGLES, "Mul"} and node.inputs[0] is not None:
        if node.op_type == "Mul" and scalar(node.inputs[1]) is None:
            return None
        node = node.inputs[0].producer()
    twice = node is not None and node.op_type == "Concat" and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    return values if twice and node is not None and node.attributes.get_int("axis") in (-1, 2) else None


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


def _fuse(found: TurnedHeads, places: ir.Value, angles: list[ir.Value]) -> None:
    """Puts the operator behind the Reshape, which now comes first."""
    flat = ir.node("Reshape", [heads_by_token(found), found.flat.inputs[1]])
    before, after = flat.outputs[0], found.flat.outputs[0]
    before.shape, before.type = after.shape, after.type
    turned = ir.node("RotaryEmbedding", [before, places, *angles], domain=_MICROSOFT)
    found.flat.prepend([flat, turned])
    replace(after, turned.outputs[0])
