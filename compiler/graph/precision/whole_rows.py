"""``[B, S, H]`` from product to product in an engine that keeps a cache, where every product takes that.

Linear layers of a template run on ``[B * S, H]``, as Gemm wants, behind a Flatten and before a Reshape. In a step of
one token each of those costs what a small operator does, and products of blocks and those with activations that are
scaled at run time need neither.

Requires: rows flattened from product to product (passes/cached/flatten_rows.py). Ensures: the same numbers; a graph in
which something wants ``[B * S, H]`` stays as it is.
"""

from __future__ import annotations

import onnx
from onnx import helper

from ..passes.elementwise import ELEMENTWISE
from .edit import MICROSOFT, Edit

_ANY_RANK = ELEMENTWISE | {"MatMulNBits", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}


def in_whole_rows(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` without Flatten and Reshape around its products, or as it is."""
    edit, whole, renamed = Edit(proto), dict[str, str](), dict[str, str]()
    integers: dict[str, str] = {}  # what was quantised, by the integers
    lengths = _target_lengths(proto)
    if all(node.op_type != "GroupQueryAttention" for node in edit.source):
        return proto
    for node in edit.source:
        flat = [name for name in node.input if name in whole]
        node.input[:] = [renamed.get(name, name) for name in node.input]
        if node.op_type == "Flatten" and not flat and _attribute(node, "axis", 1) == 2:
            whole[node.output[0]] = node.input[0]
            edit.nodes.append(node)  # for angles
        elif node.op_type == "QGemm" and node.input[0] in integers and not _attribute(node, "transB", 0):
            edit.add("DynamicQuantizeMatMul", [integers[node.input[0]], *node.input[3:6]], node.output, MICROSOFT)
            whole[node.output[0]] = node.output[0]
        elif any(name in integers for name in node.input):
            return proto
        elif not flat:
            edit.nodes.append(node)
        elif node.op_type == "DynamicQuantizeLinear":
            integers |= dict.fromkeys(node.output, whole[node.input[0]])
        elif node.op_type == "Reshape" and lengths.get(node.input[1]) == 3:
            renamed[node.output[0]] = whole[node.input[0]]
        elif node.op_type == "Reshape" or node.op_type in _ANY_RANK:
            node.input[:] = [whole.get(name, name) for name in node.input]
            edit.nodes.append(node)
            whole |= {} if node.op_type == "Reshape" else {name: name for name in node.output}
        elif node.op_type == "RotaryEmbedding":  # takes its angles flat
            edit.nodes.append(node)
        else:
            return proto
    _name_outputs(edit, {value.name for value in proto.graph.output}, renamed)
    return edit.done()


def _target_lengths(proto: onnx.ModelProto) -> dict[str, int]:
    """Of the vectors that Reshapes take: how many dimensions they give, where the graph says it."""
    found = {tensor.name: tensor.dims[0] for tensor in proto.graph.initializer if len(tensor.dims) == 1}
    for node in proto.graph.node:
        if node.op_type == "Shape":
            start, end = _attribute(node, "start", 0), _attribute(node, "end", 0)
            found |= {node.output[0]: end - start} if end > start else {}
        elif node.op_type == "Concat" and all(name in found for name in node.input):
            found[node.output[0]] = sum(found[name] for name in node.input)
    return found


def _name_outputs(edit: Edit, outputs: set[str], renamed: dict[str, str]) -> None:
    """Gives what a Reshape made an output of the graph its name."""
    names = {renamed[name]: name for name in outputs if name in renamed}
    for node in edit.nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    found = [helper.get_attribute_value(attribute) for attribute in node.attribute if attribute.name == name]
    return int(found[0]) if found else default
