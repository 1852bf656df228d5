"""Rows and tokens stay one dimension from product to product: ``[B * S, H]`` where the model speaks ``[B, S, H]``.

A linear layer runs on ``[B * S, H]`` between a Flatten and a Reshape. What is computed element by element, or over the
last dimension, is computed there too, so that only attention, which needs both dimensions, has Reshapes around it.

Requires: shapes known. Ensures: the same function. Reshapes that meet stay for ``merge_reshapes``.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..elementwise import ELEMENTWISE
from ..extents import Extent, extents, product, shape_of

_OVER_LAST = frozenset({"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"})


def flatten_rows(model: ir.Model) -> bool:
    """Moves what it can in front of the Reshapes, in the order of the graph."""
    flat: dict[ir.Value, ir.Value] = {}
    return bool(sum(_flatten(node, flat) for node in list(model.graph)))


def _flatten(node: ir.Node, flat: dict[ir.Value, ir.Value]) -> bool:
    """Makes ``node`` work on ``[B * S, H]`` if an input of it comes from there."""
    result = node.outputs[0]
    dims = extents(result)
    if node.op_type not in ELEMENTWISE | _OVER_LAST or dims is None or len(dims) != 3 or result.is_graph_output():
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
        made = ir.node("Flatten", [value], {"axis": 2})
        made.outputs[0].shape, made.outputs[0].type = shape_of(_rows(dims)), value.type
        node.append(made)
        flat[value] = made.outputs[0]
    return flat[value]


def _reshaped_back(node: ir.Node, output: ir.Value, shape: ir.Value) -> ir.Value:
    """``output`` of ``node``, now flat, as all that read it before have it."""
    uses, dims = list(output.uses()), extents(output)
    assert dims is not None
    reshape = ir.node("Reshape", [output, shape])
    back = reshape.outputs[0]
    back.name, back.shape, back.type = output.name, output.shape, output.type
    output.name, output.shape = f"{output.name}_flat", shape_of(_rows(dims))
    for use in uses:
        use.node.replace_input_with(use.idx, back)
    node.append(reshape)
    return back


def _rows(dims: Sequence[Extent]) -> tuple[Extent, Extent]:
    return product(dims[:2]), dims[2]
