"""Extents in attributes of nodes, which a slice of a weight changes too."""

from __future__ import annotations

import onnx

_MATMUL_N_BITS = "MatMulNBits"


def fix_extents(graph: onnx.ModelProto) -> None:
    """Sets the number of outputs of every ``MatMulNBits``, an attribute, to that of the weight's view."""
    extents = {tensor.name: tensor.dims for tensor in graph.graph.initializer}
    for node in graph.graph.node:
        if node.op_type == _MATMUL_N_BITS:
            for attribute in node.attribute:
                if attribute.name == "N":
                    attribute.i = extents[node.input[1]][0]
