"""Weights in the layout that slices best: linear layers as Gemm, and rows of stacked weights as weights.

torch traces ``nn.Linear`` on ``[B, S, H]`` as ``Transpose(W) -> MatMul -> Add``. Here it becomes a Gemm over
``[B * S, H]``, behind a Flatten in place of the first Reshape where ``B`` or ``S`` is free: with ``transB=1`` over the
weight as torch stores it, or with ``transB=0`` over its transpose where the spec slices the input dimension, so that
the elastic dimension is the slowest-varying one in memory.

A backend would copy the row that ``Gather(W, e)`` takes at every run. As an initializer it is what any other weight is:
mapped from the store, or packed where the engine is packed, which backends do for matrices and not for stacks of them.
"""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from ....errors import SliceError
from .contract import TRANSPOSED
from .matching import extents, new_weight, producer, product, reshape_target, typed_node


def linear_to_gemm(model: ir.Model, store_transposed: Collection[str]) -> bool:
    """Rewrites every linear layer; weights named in ``store_transposed`` are used as ``[in, out]``, under their name
    with ``.T``, and by other nodes through a Transpose."""
    graph = model.graph
    transposed: dict[str, ir.Value] = {}
    changed = False
    for node in list(graph):
        weight = _linear_weight(node)
        if weight is None:
            continue
        name = weight.name or ""
        transpose_b = name not in store_transposed
        if not transpose_b:
            if name not in transposed:
                transposed[name] = _transposed(graph, weight)
            weight = transposed[name]
        if node.op_type == "Gemm":
            node.replace_input_with(1, weight)
            node.attributes["transB"] = ir.AttrInt64("transB", int(transpose_b))
        else:
            _replace_matmul(graph, node, weight, transpose_b)
        changed = True
    for name in store_transposed:
        changed |= name in graph.initializers and _read_turned(graph, graph.initializers[name], transposed.get(name))
    return changed


def _read_turned(graph: ir.Graph, weight: ir.Value, transposed: ir.Value | None) -> bool:
    """Lets what else reads ``weight``, such as a table of biases with a column for each head, read the transpose of
    what is stored."""
    live = [use for use in weight.uses() if any(out.uses() or out.is_graph_output() for out in use.node.outputs)]
    if not live:
        return False
    dims = extents(weight)
    assert dims is not None
    stored = transposed or _transposed(graph, weight)
    turned = typed_node("Transpose", [stored], {"perm": [1, 0]}, dims, weight.type)
    graph.insert_before(graph[0], [turned])
    for use in live:
        use.node.replace_input_with(use.idx, turned.outputs[0])
    return True


def rows_as_weights(model: ir.Model, parameters: Collection[str]) -> bool:
    """Makes a weight, ``W[e]``, of every row of one of ``parameters`` that the graph takes by a constant ``e``."""
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
    return bool(rows)


def _linear_weight(node: ir.Node) -> ir.Value | None:
    """The ``[out, in]`` parameter if ``node`` is ``MatMul(x, Transpose(W))`` or ``Gemm(x, W, transB=1)``."""
    if node.op_type == "Gemm" and node.attributes.get_int("transB") and not node.attributes.get_int("transA"):
        weight = node.inputs[1]
        return weight if weight is not None and weight.is_initializer() else None
    turned = producer(node, 1, "Transpose") if node.op_type == "MatMul" else None
    weight = None if turned is None else turned.inputs[0]
    if weight is None or weight.shape is None or len(weight.shape) != 2:
        return None
    return weight if weight.is_initializer() else None


def _transposed(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    """A new initializer ``W.T [in, out]``."""
    tensor = weight.const_value
    assert tensor is not None
    shape = [*reversed(tensor.shape.numpy())]
    name = f"{weight.name}{TRANSPOSED}"
    return new_weight(graph, name, shape, tensor.dtype, lambda: np.ascontiguousarray(tensor.numpy().T))


def _replace_matmul(graph: ir.Graph, node: ir.Node, weight: ir.Value, transpose_b: bool) -> None:
    x, extents_of_x = node.inputs[0], extents(node.inputs[0])
    assert x is not None
    if extents_of_x is None:
        raise SliceError(f"value {x.name}: its shape is unknown; ask for static buckets")
    rows = extents_of_x[:-1]
    tokens = product(rows)
    add, bias = _bias(node)
    last = (add or node).outputs[0]
    back_target = reshape_target(graph, [*rows, -1], [x])
    if isinstance(tokens, int):
        flat_target = reshape_target(graph, [tokens, -1])
        flat = ir.node("Reshape", [x, flat_target[-1].outputs[0]])
    else:
        flat_target, flat = [], ir.node("Flatten", [x], attributes={"axis": len(rows)})
    gemm = ir.node(
        "Gemm",
        [flat.outputs[0], weight, *([bias] if bias is not None else [])],
        attributes={"transB": int(transpose_b)},
    )
    back = ir.node("Reshape", [gemm.outputs[0], back_target[-1].outputs[0]])
    result = back.outputs[0]
    for value, like in ((flat.outputs[0], x), (gemm.outputs[0], last)):
        assert like.shape is not None
        value.shape, value.type = ir.Shape([tokens, (extents(like) or (0,))[-1]]), like.type
    result.name, result.shape, result.type = last.name, last.shape, last.type
    graph.insert_before(node, [*flat_target, flat, gemm, *back_target, back])
    ir.convenience.replace_all_uses_with(last, result, replace_graph_outputs=True)
    graph.remove([part for part in (add, node) if part is not None], safe=True)


def _bias(matmul: ir.Node) -> tuple[ir.Node | None, ir.Value | None]:
    """The ``Add`` of a rank-one initializer that alone follows the MatMul, and that initializer."""
    uses = list(matmul.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add" or matmul.outputs[0].is_graph_output():
        return None, None
    add = uses[0].node
    bias = add.inputs[1 - uses[0].idx]
    if bias is None or not bias.is_initializer() or bias.shape is None or len(bias.shape) != 1:
        return None, None
    return add, bias


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
    return new_weight(graph, name, tensor.shape.numpy()[1:], tensor.dtype, lambda: tensor.numpy()[row])
