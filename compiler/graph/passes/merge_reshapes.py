"""One Reshape where two follow each other, none where nothing changes, and Reshapes moved behind elementwise work.

Linear layers run on ``[B * S, H]`` while the rest of the graph speaks ``[B, S, H]``; moving the outer Reshape behind an
activation lets it meet the next layer's inner one, and both disappear.

A Flatten is a Reshape to two dimensions whatever the sizes of those before its axis are. A Reshape behind an Unsqueeze
or a Squeeze needs neither.

Requires: Reshape targets without zeros; extents that are numbers or names. Ensures: no Reshape reads another Reshape.
"""

from __future__ import annotations

import onnx_ir as ir

from .elementwise import ACTIVATIONS
from .extents import extents, product

_RESHAPES = {"Reshape", "Flatten"}
_BEFORE_RESHAPES = _RESHAPES | {"Unsqueeze", "Squeeze"}
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
    if source is None or source.op_type not in _BEFORE_RESHAPES or source.inputs[0] is None:
        return False
    if _is_elementwise(node) and source.op_type in _RESHAPES:
        return _move_behind(node, source)
    if node.op_type not in _RESHAPES or (node.op_type == "Flatten" and not _flatten_from(node, source.inputs[0])):
        return False
    inner = source.inputs[0]
    node.replace_input_with(0, inner)
    if extents(inner) == extents(node.outputs[0]) is not None and not node.outputs[0].is_graph_output():
        ir.convenience.replace_all_uses_with(node.outputs[0], inner)
    return True


def _flatten_from(flatten: ir.Node, inner: ir.Value) -> bool:
    """Sets the axis of ``flatten`` to the one at which ``inner`` flattens to the same, if there is one."""
    dims, flat = extents(inner), extents(flatten.outputs[0])
    if dims is None or flat is None:
        return False
    axes = [axis for axis in range(len(dims) + 1) if (product(dims[:axis]), product(dims[axis:])) == flat]
    if not axes:
        return False
    flatten.attributes["axis"] = ir.AttrInt64("axis", axes[0])
    return True


def _move_behind(node: ir.Node, reshape: ir.Node) -> bool:
    """``Reshape -> f`` becomes ``f -> Reshape``; the result keeps its name and shape."""
    inner, result = reshape.inputs[0], node.outputs[0]
    uses = list(result.uses())
    if inner is None or not _meets_reshapes(result):
        return False
    node.replace_input_with(0, inner)
    again = ir.node(reshape.op_type, [result, *reshape.inputs[1:]], attributes=reshape.attributes)
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
            and (use.node.op_type in _RESHAPES or (_is_elementwise(use.node) and _meets_reshapes(use.node.outputs[0])))
            for use in uses
        )
    )
