"""Whole numbers kept within bounds by Max and Min: TensorRT's parser clips floating point alone.

Distances between tokens are such numbers, where a bias is looked up by them.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

_INTEGER_TYPES = (TensorProto.INT32, TensorProto.INT64)
# Inputs of the operator behind what it clips, and what does the same by each.
_BOUNDS = ((1, "Max"), (2, "Min"))


def whole_clips(model: onnx.ModelProto) -> int:
    """Replaces every Clip whose bounds are whole numbers among the initializers, in place; returns how many."""
    graph = model.graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    changed = 0
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        bounds = [(node.input[at], kind) for at, kind in _BOUNDS if len(node.input) > at and node.input[at]]
        if node.op_type != "Clip" or not bounds or any(kinds.get(name) not in _INTEGER_TYPES for name, _ in bounds):
            continue
        del graph.node[index]
        result, source = node.output[0], node.input[0]
        for number, (bound, kind) in enumerate(bounds):
            output = result if number == len(bounds) - 1 else f"{result}.{kind}"
            graph.node.insert(index + number, helper.make_node(kind, [source, bound], [output], f"{node.name}.{kind}"))
            source = output
        changed += 1
    return changed
