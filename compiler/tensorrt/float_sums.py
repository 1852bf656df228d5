"""Running counts, computed in float32: TensorRT's parser takes no running sums of whole numbers.

Positions of tokens are such counts: sums over a mask. Up to 2^24 elements they are exact in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from ...bucket import MAX_TOKENS

# Whole numbers up to here are exact in float32.
_EXACT_IN_FLOAT32 = 2**24
# As buckets name them, whose product is at most MAX_TOKENS.
_FREE_DIMENSIONS = ("batch", "sequence")
_INTEGER_TYPES = (TensorProto.INT32, TensorProto.INT64)
_Types = Mapping[str, onnx.TypeProto.Tensor]


def float_sums(model: onnx.ModelProto) -> int:
    """Puts every CumSum over a mask between casts to float32 and back, in place; returns how many.

    A sum of anything but a mask's zeros and ones, or of 2^24 elements and more, stays as it is: it may not be exact.
    """
    graph = model.graph
    inferred = onnx.shape_inference.infer_shapes(model).graph
    types = {v.name: v.type.tensor_type for v in (*inferred.value_info, *inferred.input, *inferred.output)}
    makers = {name: node for node in graph.node for name in node.output}
    changed = 0
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if node.op_type != "CumSum" or not _counts(node.input[0], types, makers):
            continue
        source, result, kind = node.input[0], node.output[0], types[node.input[0]].elem_type
        before = helper.make_node("Cast", [source], [f"{result}.mask"], f"{node.name}.float", to=TensorProto.FLOAT)
        after = helper.make_node("Cast", [f"{result}.count"], [result], f"{node.name}.whole", to=kind)
        node.input[0], node.output[0] = before.output[0], after.input[0]
        graph.node.insert(index + 1, after)
        graph.node.insert(index, before)
        changed += 1
    return changed


def _counts(name: str, types: _Types, makers: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether ``name`` holds whole numbers that are 0 or 1, fewer than 2^24 of them."""
    tensor = types.get(name)
    if tensor is None or tensor.elem_type not in _INTEGER_TYPES:
        return False
    sizes = [MAX_TOKENS if dim.dim_param in _FREE_DIMENSIONS else dim.dim_value for dim in tensor.shape.dim]
    if not all(sizes) or max(sizes, default=0) >= _EXACT_IN_FLOAT32:
        return False
    while types[name].elem_type != TensorProto.BOOL:
        maker = makers.get(name)
        if maker is None or maker.op_type != "Cast" or maker.input[0] not in types:
            return False
        name = maker.input[0]
    return True
