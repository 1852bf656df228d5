"""What an engine in bfloat16 computes, as a graph of float32: ONNX Runtime has no such products for processors.

Weights are the engine's own, read from the store in 16 bits and widened, which is exact. What a node computes is
rounded to 16 bits and widened again wherever the engine holds 16 bits. Products are summed in float32, as GPUs do it.
The same holds of an engine in float16: there ONNX Runtime drops roundings between nodes that it widens itself, so its
own run says less about a GPU's.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from .edit import Edit
from .fp32_nodes import MOVEMENT, element_types

_SIXTEEN_BIT_TYPES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})


def emulated(graph: bytes) -> bytes:
    """The emitted engine ``graph`` as float32, rounding where it holds 16 bits; reads the same bytes of the store."""
    model = onnx.ModelProto.FromString(graph)
    narrow = {name: kind for name, kind in element_types(model).items() if kind in _SIXTEEN_BIT_TYPES}
    edit, widened = Edit(model), dict[str, str]()
    for name in list(edit.initializers):
        if name in narrow:
            widened[name] = edit.add("Cast", [name], to=TensorProto.FLOAT)
    for node in edit.source:
        node.input[:] = [widened.get(name, name) for name in node.input]
        edit.nodes.append(node)
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i in _SIXTEEN_BIT_TYPES:
                attribute.i = TensorProto.FLOAT
        if node.op_type in MOVEMENT - {"Cast"}:
            continue  # of what is rounded already
        for place, name in enumerate(node.output):
            if name in narrow:
                node.output[place] = f"{name}.exact"
                rounded = edit.add("Cast", [node.output[place]], to=narrow[name])
                edit.add("Cast", [rounded], [name], to=TensorProto.FLOAT)
    raw: bytes = edit.done().SerializeToString(deterministic=True)
    return raw
