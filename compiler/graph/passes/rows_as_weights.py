"""One expert of stacked weights as a weight of its own: ``Gather(W, e)`` at a constant ``e`` reads a view of the store.

A backend would copy the row at every run. As an initializer it is what any other weight is: mapped from the store, or
packed where the engine is packed, which backends do for matrices and not for stacks of them.

Requires: parameters are initializers under their names; constants folded. Ensures: the same function; a row is called
``W[e]``. Nodes and weights left unused stay for the caller's dead-code removal.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import onnx_ir as ir

_ROW_NAME = re.compile(r"(?P<stack>.+)\[(?P<row>\d+)\]")


def rows_as_weights(model: ir.Model, parameters: Collection[str]) -> set[str]:
    """Makes a weight of every row of one of ``parameters`` that the graph takes by a constant; returns their names."""
    rows: dict[str, ir.Value] = {}
    for node in list(model.graph):
        taken = _taken(node, parameters)
        if taken is None:
            continue
        stack, row = taken
        name = f"{stack.name}[{row}]"
        if name not in rows:
            rows[name] = _row(model.graph, name, stack, row)
        ir.convenience.replace_all_uses_with(node.outputs[0], rows[name])
    return set(rows)


def stack_of(name: str) -> tuple[str, int | None]:
    """The parameter and the number of the row that ``name`` stands for; no number for a whole parameter."""
    match = _ROW_NAME.fullmatch(name)
    return (match["stack"], int(match["row"])) if match else (name, None)


def _taken(node: ir.Node, parameters: Collection[str]) -> tuple[ir.Value, int] | None:
    """The parameter and the number of its row that ``node`` reads, if that is what it does."""
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0 or node.outputs[0].is_graph_output():
        return None
    stack, index = node.inputs
    if stack is None or index is None or stack.name not in parameters or not stack.is_initializer():
        return None
    number = ir.convenience.get_const_tensor(index)
    if number is None or number.size != 1 or len(number.shape) != 0:
        return None
    row = int(number.numpy().item())
    assert stack.shape is not None
    return stack, row if row >= 0 else row + int(stack.shape.numpy()[0])


def _row(graph: ir.Graph, name: str, stack: ir.Value, row: int) -> ir.Value:
    tensor = stack.const_value
    assert tensor is not None
    shape = ir.Shape(tensor.shape.numpy()[1:])
    lazy = ir.LazyTensor(lambda: ir.Tensor(tensor.numpy()[row], name=name), dtype=tensor.dtype, shape=shape, name=name)
    value = ir.Value(name=name, shape=shape, type=stack.type, const_value=lazy)
    graph.register_initializer(value)
    return value
