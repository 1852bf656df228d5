"""Two Slices that take the halves of a tensor's last dimension as one Split, as rotary positions turn each head.

onnxscript has this rule too, but searches the whole graph for the second Slice at every node: with the layers its time
grows by their square.

Requires: constants folded, static shapes. Ensures: the same function. Slices left unused stay for the caller's
dead-code removal.
"""

from __future__ import annotations

import onnx_ir as ir


def slices_to_split(model: ir.Model) -> bool:
    """Rewrites every pair of halves."""
    changed = False
    for node in list(model.graph):
        if not _is_half(node, 0):
            continue
        source = node.inputs[0]
        assert source is not None
        second = next((use.node for use in source.uses() if use.idx == 0 and _is_half(use.node, 1)), None)
        if second is not None:
            _replace(node, second)
            changed = True
    return changed


def _is_half(node: ir.Node, which: int) -> bool:
    """Whether ``node`` takes the first (0) or the second (1) half of the last dimension."""
    if node.op_type != "Slice" or len(node.inputs) != 4 or node.outputs[0].is_graph_output():
        return False
    source = node.inputs[0]
    begin, end, axis = (_number(value) for value in node.inputs[1:])
    if source is None or source.shape is None or begin is None or end is None:
        return False
    rank, extent = len(source.shape), source.shape[-1]
    if axis not in (-1, rank - 1) or not isinstance(extent, int) or extent % 2:
        return False
    half = extent // 2
    return (begin, end) == (0, half) if which == 0 else begin == half and end >= extent


def _number(value: ir.Value | None) -> int | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return int(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def _replace(first: ir.Node, second: ir.Node) -> None:
    """Before whichever of the two comes first in the graph, since either may."""
    graph, source = first.graph, first.inputs[0]
    assert graph is not None
    split = ir.node("Split", [source], attributes={"axis": -1, "num_outputs": 2}, num_outputs=2)
    producer = source.producer() if source is not None else None
    if producer is not None:
        producer.append(split)
    else:
        graph.insert_before(next(iter(graph)), split)
    for old, new in zip((first, second), split.outputs, strict=True):
        value = old.outputs[0]
        new.name, new.shape, new.type = value.name, value.shape, value.type
        ir.convenience.replace_all_uses_with(value, new)
        value.name = f"{value.name}_sliced"
