"""Reshapes between linear layers: moved to where they meet, and merged.

Linear layers run on ``[B * S, H]``, between a Flatten or a Reshape and a Reshape, while the rest of the graph speaks
``[B, S, H]``. A Flatten is a Reshape to two dimensions whatever the sizes of those before its axis are.
"""

from collections.abc import Sequence

import onnx_ir as ir

from .matching import Extent, constant, extents, product, typed_node
from .operators import ACTIVATIONS, ELEMENTWISE, NORMS

_RESHAPES = {"Reshape", "Flatten"}
_BEFORE_RESHAPES = _RESHAPES | {"Unsqueeze", "Squeeze"}
_UNARY_OPERATORS = ACTIVATIONS | {"Identity"}
# Operators of one tensor where the second operand is a single number: squared ReLU ends in a Pow.
_SCALAR_OPERATORS = {"Add", "Sub", "Mul", "Div", "Pow"}


def merge_reshapes(model: ir.Model) -> bool:
    """One Reshape where two follow each other, none where nothing changes, and Reshapes moved behind elementwise work,
    so that the one behind a layer meets the one in front of the next. A Reshape behind an Unsqueeze or a Squeeze needs
    neither. Reshapes left unused stay for dead-code removal."""
    changed = False
    while sum(_apply(node) for node in model.graph):  # a sum visits every node, where any() stops at the first
        changed = True
    return changed


def flatten_rows(model: ir.Model) -> bool:
    """Computes on ``[B * S, H]``, in front of the Reshape behind a layer, what is elementwise or over the last
    dimension, so that only attention, which needs both dimensions, has Reshapes around it."""
    flat: dict[ir.Value, ir.Value] = {}
    return bool(sum(_flatten(node, flat) for node in list(model.graph)))


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
    number = constant(node, 1) if node.op_type in _SCALAR_OPERATORS else None
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


def _flatten(node: ir.Node, flat: dict[ir.Value, ir.Value]) -> bool:
    """Makes ``node`` work on ``[B * S, H]`` if an input of it comes from there."""
    result = node.outputs[0]
    dims = extents(result)
    if node.op_type not in ELEMENTWISE | NORMS or dims is None or len(dims) != 3 or result.is_graph_output():
        return False
    given = [value for value in node.inputs if value is not None]
    wide = [value for value in given if extents(value) == dims and value.producer() is not None]
    shape = next((target for value in wide if (target := _shape_given_back(value)) is not None), None)
    if shape is None or any(len(extents(value) or (0, 0)) > 1 for value in given if value not in wide):
        return False
    for index, value in enumerate(node.inputs):
        if value in wide:
            node.replace_input_with(index, _flat(value, flat))
    for output in node.outputs:
        if output.uses():
            flat[_reshaped_back(node, output, shape)] = output
    return True


def _shape_given_back(value: ir.Value) -> ir.Value | None:
    """The target of the Reshape that makes ``value`` of its rows."""
    dims, node = extents(value), value.producer()
    if dims is None or node is None or node.op_type != "Reshape" or extents(node.inputs[0]) != _rows(dims):
        return None
    return node.inputs[1]


def _flat(value: ir.Value, flat: dict[ir.Value, ir.Value]) -> ir.Value:
    """The rows of ``value``, flattened where it is made unless they are there."""
    node, dims = value.producer(), extents(value)
    assert node is not None
    assert dims is not None
    if value not in flat and _shape_given_back(value) is not None and node.inputs[0] is not None:
        flat[value] = node.inputs[0]
    if value not in flat:
        made = typed_node("Flatten", [value], {"axis": 2}, _rows(dims), value.type)
        node.append(made)
        flat[value] = made.outputs[0]
    return flat[value]


def _reshaped_back(node: ir.Node, output: ir.Value, shape: ir.Value) -> ir.Value:
    """``output`` of ``node``, now flat, as all that read it before have it."""
    uses, dims = list(output.uses()), extents(output)
    assert dims is not None
    reshape = typed_node("Reshape", [output, shape], {}, dims, output.type)
    back = reshape.outputs[0]
    back.name = output.name
    output.name, output.shape = f"{output.name}_flat", ir.Shape(_rows(dims))
    for use in uses:
        use.node.replace_input_with(use.idx, back)
    node.append(reshape)
    return back


def _rows(dims: Sequence[Extent]) -> tuple[Extent, Extent]:
    return product(dims[:2]), dims[2]
