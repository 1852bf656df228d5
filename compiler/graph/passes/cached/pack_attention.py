"""Queries, keys and values that lie side by side as the one input that attention over a cache takes of them.

ONNX Runtime's operator takes ``[B, S, (A + 2 K) * D]`` for ``A`` heads of queries and ``K`` of keys and of values, with
nothing in the places of its second and third input. So the Split behind a joined product, and the Reshapes behind that,
are not needed.

Requires: shapes known. Ensures: the same function; parts that something else reads, or that come in another order, are
left.
"""

from __future__ import annotations

import onnx_ir as ir

from ..dims_by_operator import CACHED_ATTENTION
from ..extents import extents, reshape_target
from ..matching import producer

# Of the operator: queries, keys and values.
_PARTS = 3


def pack_attention(model: ir.Model) -> bool:
    """Rewrites every attention over a cache whose queries, keys and values are what one Split returns."""
    packed = [node for node in model.graph if node.op_type == CACHED_ATTENTION and _pack(model.graph, node)]
    return bool(packed)


def _pack(graph: ir.Graph, attention: ir.Node) -> bool:
    """Whether ``attention`` could be packed, and was."""
    backs = [producer(attention, index, "Reshape") for index in range(_PARTS)]
    found = [back for back in backs if back is not None]
    parts = [attention.inputs[index] if back is None else back.inputs[0] for index, back in enumerate(backs)]
    split = parts[0].producer() if parts[0] is not None else None
    if split is None or split.op_type != "Split" or list(split.outputs) != parts or split.inputs[0] is None:
        return False
    rows = {(extents(back.outputs[0]) or ())[:-1] for back in found}
    between = [*split.outputs, *(back.outputs[0] for back in found)]
    if len(found) not in (0, _PARTS) or len(rows) > 1 or any(len(value.uses()) > 1 for value in between):
        return False
    if not _are_heads(attention, split) or any(len(dims) != 2 for dims in rows):
        return False
    whole = split.inputs[0]
    for dims in rows:
        target = reshape_target(graph, [*dims, -1])
        reshape = ir.node("Reshape", [whole, target[-1].outputs[0]])
        attention.prepend([*target, reshape])
        whole = reshape.outputs[0]
    for index, value in enumerate([whole, None, None]):
        attention.replace_input_with(index, value)
    graph.remove([*found, split], safe=True)
    return True


def _are_heads(attention: ir.Node, split: ir.Node) -> bool:
    """Whether the last dimension is split into heads of one size."""
    shapes = [extents(value) or (0,) for value in split.outputs]
    numbers = [attention.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
    widths = [dims[-1] for dims in shapes]
    is_last = split.attributes.get_int("axis", 0) in (-1, len(shapes[0]) - 1)
    size = widths[-1] // numbers[-1] if isinstance(widths[-1], int) and numbers[-1] else 0
    return is_last and size > 0 and widths == [number * size for number in numbers]
