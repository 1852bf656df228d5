"""One Reshape where two follow each other, none where nothing changes, and Reshapes moved behind elementwise work.

Linear layers run on ``[B * S, H]`` while the rest of the graph speaks ``[B, S, H]``; moving the outer Reshape behind an
activation lets it meet the next layer's inner one, and both disappear.

Requires: static shapes, constant Reshape targets without zeros. Ensures: no Reshape reads another Reshape.
"""

from __future__ import annotations

import onnx_ir as ir

from .elementwise import ACTIVATIONS

_UNARY_OPERATORS = ACTIVATIONS | {"Identity"}
# Of one tensor where the second operand is a single number: squared ReLU ends in a Pow.
_SCALAR_OPERATORS = {"Add", "Sub", "Mul", "Div", "Pow"}


def merge_reshapes(model: ir.Model) -> bool:
    """Applies the three rules until none does; Reshapes left unused stay for the caller's dead-code removal."""
    changed = False
    while sum(_apply(node) for node in model.graph):  # a sum visits every node, where any() stops at the first
        changed = True
    return changed


def _apply(node: ir.Node) -> bool:
    source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if source is None or source.op_type != "Reshape" or source.inputs[0] is None:
        return False
    if _is_elementwise(node):
        return _move_behind(node, source)
    if node.op_type != "Reshape":
        return False
    node.replace_input_with(0, source.inputs[0])
    if source.inputs[0].shape == node.outputs[0].shape and not node.outputs[0].is_graph_output():
        ir.convenience.replace_all_uses_with(node.outputs[0], source.inputs[0])
    return True


def _move_behind(node: ir.Node, reshape: ir.Node) -> bool:
    """``Reshape -> f`` becomes ``f -> Reshape``; the result keeps its name and shape."""
    inner, target, result = reshape.inputs[0], reshape.inputs[1], node.outputs[0]
    uses = list(result.uses())
    if inner is None or not _meets_reshapes(result):
        return False
    node.replace_input_with(0, inner)
    again = ir.node("Reshape", [result, target], attributes=reshape.attributes)
    moved = again.outputs[0]
    moved.name, moved.shape, moved.type = result.name, result.shape, result.type
    result.name, result.shape = f"{result.name}_flat", inner.shape
    for use in uses:
        use.node.replace_input_with(use.idx, moved)
    node.append(again)
    return True


def _is_elementwise(node: ir.Node) -> bool:
    """Whether ``node`` works on the elements of its first input alone, whatever their shape."""
    if node.op_type in _UNARY_OPERATORS:
        return True
    if node.op_type not in _SCALAR_OPERATORS or node.inputs[1] is None:
        return False
    number = ir.convenience.get_const_tensor(node.inputs[1])
    return number is not None and number.size == 1 and len(number.shape) <= 1


def _meets_reshapes(value: ir.Value) -> bool:
    """Whether all that is made of ``value``, through elementwise work alone, goes into Reshapes."""
    uses = list(value.uses())
    return (
        bool(uses)
        and not value.is_graph_output()
        and all(
            use.idx == 0
            and (use.node.op_type == "Reshape" or (_is_elementwise(use.node) and _meets_reshapes(use.node.outputs[0])))
            for use in uses
        )
    )
