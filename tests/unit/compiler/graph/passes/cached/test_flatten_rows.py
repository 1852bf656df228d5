from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from nestforge.compiler.graph.passes.cached.flatten_rows import flatten_rows
from nestforge.compiler.graph.passes.merge_reshapes import merge_reshapes
from onnx_ir.passes.common import RemoveUnusedNodesPass

# What lies between two products: a bias, a residual sum with what has no rows yet, a norm, and the sum given on.
BETWEEN = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
agraph (float[6, 4] rows, float[2, 3, 4] embedded, float[4] w) => (float[6, 4] y, float[2, 3, 4] rest)
<int64[3] whole = {2, 3, 4}>
{
  residual = Relu (embedded)
  x = Reshape (rows, whole)
  biased = Add (x, w)
  sum = Add (residual, biased)
  normed = SimplifiedLayerNormalization <axis = -1, epsilon = 0.01> (sum, w)
  flat = Flatten <axis = 2> (normed)
  y = Abs (flat)
  rest = Sqrt (sum)
}
"""


def flattened(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto, Counter[str]]:
    before = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    model = ir.from_proto(before)
    shapes = {"normed": [2, 3, 4], "flat": [6, 4], "y": [6, 4]}  # onnx knows nothing of the norm
    for node in model.graph:
        for value in node.outputs:
            if value.name in shapes:
                value.shape, value.type = ir.Shape(shapes[value.name]), ir.TensorType(ir.DataType.FLOAT)
    flatten_rows(model)
    merge_reshapes(model)
    RemoveUnusedNodesPass()(model)
    return before, ir.to_proto(model), Counter(node.op_type for node in model.graph)


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {
        value.name: rng.random([dim.dim_value for dim in value.type.tensor_type.shape.dim], np.float32)
        for value in model.graph.input
    }
    found: list[np.ndarray] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    return found


def test_what_lies_between_products_stays_in_rows() -> None:
    before, after, kinds = flattened(BETWEEN)
    # One Flatten of what had no rows, one Reshape for what is an output.
    work = {"Relu": 1, "Add": 2, "SimplifiedLayerNormalization": 1, "Abs": 1, "Sqrt": 1}
    assert kinds == {**work, "Flatten": 1, "Reshape": 1}
    for found, expected in zip(run(after), run(before), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_what_broadcasts_over_tokens_stays_as_it_is() -> None:
    text = BETWEEN.replace("float[4] w)", "float[4] w, float[2, 1, 4] u)").replace("Add (x, w)", "Add (x, u)")
    before, after, kinds = flattened(text)
    assert kinds["Flatten"] == kinds["Reshape"] == 1
    assert [node.op_type for node in after.graph.node][1] == "Reshape"
    for found, expected in zip(run(after), run(before), strict=True):
        np.testing.assert_array_equal(found, expected)
