"""Queries, keys and values that lie side by side as the one input that attention over a cache takes of them.

ONNX Runtime's operator takes ``[B, S, (A + 2 K) * D]`` for ``A`` heads of queries and ``K`` of keys and of values, with
nothing in the places of its second and third input. So what takes them apart behind one product, a Split or Slices, is
not needed, nor are the Reshapes behind that.

Requires: shapes known. Ensures: the same function; parts that something else reads, or that come in another order, are
left.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..dims_by_operator import CACHED_ATTENTION
from ..extents import extents, reshape_target
from ..matching import producer, scalar

# Of the operator: queries, keys and values.
_PARTS = 3


def pack_attention(model: ir.Model) -> bool:
    """Rewrites every attention over a cache whose queries, keys and values are lie side by side in one value."""
    packed = [node for node in model.graph if node.op_type == CACHED_ATTENTION and _pack(model.graph, node)]
    return bool(packed)


def _pack(graph: ir.Graph, attention: ir.Node) -> bool:
    """Whether ``attention`` could be packed, and was."""
    backs = [producer(attention, index, "Reshape") for index in range(_PARTS)]
    found = [back for back in backs if back is not None]
    parts = [attention.inputs[index] if back is None else back.inputs[0] for index, back in enumerate(backs)]
    taken = [part for part in parts if part is not None]
    whole = _whole(taken) if len(taken) == _PARTS and _are_heads(attention, taken) else None
    rows = {(extents(back.outputs[0]) or ())[:-1] for back in found}
    if whole is None or len(found) not in (0, _PARTS) or len(rows) > 1 or any(len(dims) != 2 for dims in rows):
        return False
    if any(len(value.uses()) > 1 for value in (*taken, *(back.outputs[0] for back in found))):
        return False
    if any(_width(back.outputs[0]) != _width(part) for back, part in zip(found, taken, strict=False)):
        return False  # parts of each head, which do not lie as the operator takes them
    for dims in rows:
        target = reshape_target(graph, [*dims, -1])
        reshape = ir.node("Reshape", [whole, target[-1].outputs[0]])
        attention.prepend([*target, reshape])
        whole = reshape.outputs[0]
    for index, value in enumerate([whole, None, None]):
        attention.replace_input_with(index, value)
    makers = dict.fromkeys(node for part in taken if (node := part.producer()) is not None)
    graph.remove([*found, *makers], safe=True)
    return True


def _whole(parts: Sequence[ir.Value]) -> ir.Value | None:
    """What ``parts`` lie side by side in, in its last dimension: that which one Split, or Slices, take them from."""
    makers = [part.producer() for part in parts]
    first = makers[0]
    if first is None or first.inputs[0] is None:
        return None
    dims = extents(first.inputs[0]) or (0,)
    if first.op_type == "Split":
        is_last = first.attributes.get_int("axis", 0) in (-1, len(dims) - 1)
        return first.inputs[0] if is_last and list(first.outputs) == list(parts) else None
    begin = 0
    for part, maker in zip(parts, makers, strict=True):
        end = begin + _width(part)
        if maker is None or maker.op_type != "Slice" or maker.inputs[0] is not first.inputs[0]:
            return None
        start, stop, axis, *step = (scalar(value) for value in maker.inputs[1:])
        ends = stop == end or (end == dims[-1] and stop is not None and stop > end)
        if start != begin or not ends or axis not in (-1, len(dims) - 1) or step not in ([], [1]):
            return None
        begin = end
    return first.inputs[0] if begin == dims[-1] else None


def _are_heads(attention: ir.Node, parts: Sequence[ir.Value]) -> bool:
    """Whether ``parts`` are heads of one size."""
    numbers = [attention.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
    size = _width(parts[-1]) // max(1, numbers[-1])
    return size > 0 and [_width(part) for part in parts] == [number * size for number in numbers]


def _width(value: ir.Value) -> int:
    """The last extent; 0 where it is no number."""
    last = (extents(value) or (0,))[-1]
    return last if isinstance(last, int) else 0
