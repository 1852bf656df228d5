"""What passes that look for a pattern of nodes have in common."""

from __future__ import annotations

import onnx_ir as ir


def producer(node: ir.Node | None, index: int, kind: str) -> ir.Node | None:
    """The node of ``kind`` that makes input ``index`` of ``node``; None where it is another or there is none."""
    value = node.inputs[index] if node is not None and index < len(node.inputs) else None
    found = value.producer() if value is not None else None
    return found if found is not None and found.op_type == kind else None


def scalar(value: ir.Value | None) -> float | None:
    """The number that ``value`` always is, or None."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def replace(value: ir.Value, result: ir.Value) -> None:
    """Makes ``result``, of a node that is in the graph, what ``value`` was: under its name, for all that read it."""
    result.name, result.shape, result.type = value.name, value.shape, value.type
    ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
