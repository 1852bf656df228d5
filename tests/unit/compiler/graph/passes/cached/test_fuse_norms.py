from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nestforge.compiler.graph.passes.cached.fuse_norms import fuse_norms
from onnx_ir.passes.common import RemoveUnusedNodesPass

# A residual sum, its norm, and a gate, as a decoder's layer has them; what it gives on is the sum.
LAYER = """
<ir_version: 10, opset_import: ["" : 20]>
agraph (float[2, 3, 8] a, float[2, 3, 8] b, float[8] w) => (float[2, 3, 8] y, float[2, 3, 8] rest)
<float two = {2.0}, float e = {0.01}, int64[1] last = {-1}>
{
  x = Add (a, b)
  p = Pow (x, two)
  m = ReduceMean <keepdims = 1> (p, last)
  t = Add (m, e)
  s = Sqrt (t)
  r = Reciprocal (s)
  n = Mul (x, r)
  normed = Mul (w, n)
  g = Sigmoid (normed)
  y = Mul (normed, g)
  rest = Mul (x, two)
}
"""


def fused(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto, Counter[str]]:
    before = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    model = ir.from_proto(before)
    fuse_norms(model)
    RemoveUnusedNodesPass()(model)
    model.opset_imports["com.microsoft"] = 1
    return before, ir.to_proto(model), Counter(node.op_type for node in model.graph)


def require_same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    for found, expected in zip(run(after), run(before), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=1e-6)


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {
        value.name: rng.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in model.graph.input
    }
    found: list[np.ndarray] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    return found


@pytest.mark.parametrize(
    ("old", "new"), [("", ""), ("Mul (x, r)", "Mul (r, x)"), ("Mul (w, n)", "Mul (n, w)"), ("{-1}", "{2}")]
)
def test_a_layer_keeps_its_function_in_fewer_nodes(old: str, new: str) -> None:
    before, after, kinds = fused(LAYER.replace(old, new))
    assert kinds == {"SkipSimplifiedLayerNormalization": 1, "QuickGelu": 1, "Mul": 1}
    require_same(before, after)


@pytest.mark.parametrize(
    ("old", "new", "sums"), [("Add (a, b)", "Abs (a)", {"Abs": 1}), ("float[2, 3, 8] b", "float[8] b", {"Add": 1})]
)
def test_a_norm_of_no_sum_of_two_like_it_is_one_of_its_own(old: str, new: str, sums: dict[str, int]) -> None:
    before, after, kinds = fused(LAYER.replace(old, new))
    assert kinds == {**sums, "SimplifiedLayerNormalization": 1, "QuickGelu": 1, "Mul": 1}
    require_same(before, after)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{2.0}", "{3.0}"),  # no square
        ("{-1}", "{1}"),  # over the tokens
        ("Mul (x, r)", "Mul (a, r)"),  # of another value
        ("float[8] w", "float[1, 1, 8] w"),
    ],
)
def test_what_is_no_such_norm_stays(old: str, new: str) -> None:
    _, _, kinds = fused(LAYER.replace(old, new))
    assert kinds == {"Add": 2, "Pow": 1, "ReduceMean": 1, "Sqrt": 1, "Reciprocal": 1, "Mul": 3, "QuickGelu": 1}


def test_a_weight_that_is_made_behind_the_sum_is_there_in_time() -> None:
    before, after, kinds = fused(
        LAYER.replace("  n = Mul", "  v = Abs (w)\n  n = Mul").replace("Mul (w, n)", "Mul (v, n)")
    )
    assert kinds["SkipSimplifiedLayerNormalization"] == 1
    known = {value.name for value in (*after.graph.input, *after.graph.initializer)}
    for node in after.graph.node:
        assert known >= set(node.input), node.op_type
        known.update(node.output)
    require_same(before, after)
