"""Graphs that are written as text: before a pass and behind it, and what both compute."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes.common import RemoveUnusedNodesPass


def proto_of(text: str) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))


def graph_of(text: str) -> ir.Model:
    return ir.from_proto(proto_of(text))


def passed(change: Callable[[ir.Model], object], text: str) -> tuple[onnx.ModelProto, onnx.ModelProto, bool]:
    """The graph before and behind ``change``, there without nodes that nothing reads, and whether it was changed."""
    model = graph_of(text)
    changed = bool(change(model))
    RemoveUnusedNodesPass()(model)
    model.opset_imports.setdefault("com.microsoft", 1)
    return proto_of(text), ir.to_proto(model), changed


def kinds(proto: onnx.ModelProto) -> Counter[str]:
    """How many nodes of each operator compute something."""
    return Counter(node.op_type for node in proto.graph.node if node.op_type != "Constant")


def require_same(before: onnx.ModelProto, after: onnx.ModelProto, atol: float = 0.0, least: float = -1.0) -> None:
    """Both compute the same of numbers from ``least`` to 1, of the shapes that the inputs declare."""
    rng = np.random.default_rng(0)
    feeds = {
        value.name: rng.uniform(least, 1, [d.dim_value for d in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in before.graph.input
    }
    expected, found = (
        onnxruntime.InferenceSession(one.SerializeToString()).run(None, feeds) for one in (before, after)
    )
    for array, own in zip(expected, found, strict=True):
        np.testing.assert_allclose(own, array, atol=atol, rtol=atol)
