"""Linear layers in one form: ``Reshape -> Gemm -> Reshape`` over a weight stored in the layout that slices best.

torch traces ``nn.Linear`` on ``[B, S, H]`` as ``Transpose(W) -> MatMul -> Add``. Here it becomes a Gemm over
``[B * S, H]``, behind a Flatten in place of the first Reshape where ``B`` or ``S`` is free: with ``transB=1`` over the
weight as torch stores it, or with ``transB=0`` over its transpose where the spec slices the input dimension, so that
the elastic dimension is the slowest-varying one in memory.

Requires: weights are initializers under their parameter's name. Ensures: no weight of a linear layer passes through a
Transpose, and transposed weights carry the suffix ``.T``.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from ....errors import SliceError
from .extents import extents, product, reshape_target, shape_of

TRANSPOSED = ".T"


def linear_to_gemm(model: ir.Model, store_transposed: Collection[str]) -> bool:
    """Rewrites every linear layer; weights named in ``store_transposed`` are used as ``[in, out]``."""
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
    return changed


def _linear_weight(node: ir.Node) -> ir.Value | None:
    """The ``[out, in]`` parameter if ``node`` is ``MatMul(x, Transpose(W))`` or ``Gemm(x, W, transB=1)``."""
    if node.op_type == "Gemm" and node.attributes.get_int("transB") and not node.attributes.get_int("transA"):
        weight = node.inputs[1]
        return weight if weight is not None and weight.is_initializer() else None
    if node.op_type != "MatMul" or node.inputs[1] is None:
        return None
    producer = node.inputs[1].producer()
    if producer is None or producer.op_type != "Transpose" or producer.inputs[0] is None:
        return None
    weight = producer.inputs[0]
    rank_two = weight.shape is not None and len(weight.shape) == 2
    return weight if weight.is_initializer() and rank_two else None


def _transposed(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    """A new initializer ``W.T [in, out]``; its bytes are made when the weight store is written."""
    tensor = weight.const_value
    assert tensor is not None
    lazy = ir.LazyTensor(
        lambda: ir.Tensor(np.ascontiguousarray(tensor.numpy().T), name=f"{weight.name}{TRANSPOSED}"),
        dtype=tensor.dtype,
        shape=ir.Shape(list(reversed(tensor.shape.numpy()))),
        name=f"{weight.name}{TRANSPOSED}",
    )
    value = ir.Value(name=lazy.name, shape=lazy.shape, type=ir.TensorType(lazy.dtype), const_value=lazy)
    graph.register_initializer(value)
    return value


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
        value.shape, value.type = shape_of([tokens, (extents(like) or (0,))[-1]]), like.type
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
