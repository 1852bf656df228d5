from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from nestforge.compiler.passes.free_elastic_dims import Elastic, free_elastic_dims
from nestforge.elastic import Axis
from nestforge.errors import SliceError

HEADS, FFN = Axis("layers.0.heads", 4), Axis("layers.0.ffn", 64)
SPLIT_HEADS = """
<ir_version: 10, opset_import: ["" : 20]>
split (float[6, 32] x) => (float[6, 32] y)
<float[32, 32] q, float[32, 32] o,
 int64[4] split = {2, 3, 4, 8}, int64[2] join = {6, 32}>
{
  h = Gemm <transB=1> (x, q)
  s = Reshape (h, split)
  t = Transpose <perm=[0, 2, 1, 3]> (s)
  p = Softmax <axis=-1> (t)
  u = Transpose <perm=[0, 2, 1, 3]> (p)
  j = Reshape (u, join)
  y = Gemm (j, o)
}
"""


def _model(text: str) -> ir.Model:
    """The model, with zeros for every weight that the text only declares."""
    model = onnx.parser.parse_model(text)
    given = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.value_info:
        if value.name not in given:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), value.name))
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def _targets(model: ir.Model) -> list[list[int]]:
    nodes = [node for node in model.graph if node.op_type == "Reshape"]
    return [ir.convenience.get_const_tensor(node.inputs[1]).numpy().tolist() for node in nodes]


def test_a_head_split_is_followed_and_freed() -> None:
    model = _model(SPLIT_HEADS)
    assert free_elastic_dims(model, {"q": (Elastic(HEADS), 8), "o": (Elastic(HEADS), 8)})
    assert _targets(model) == [[2, 3, -1, 8], [6, -1]]


def test_a_batch_folded_into_heads_is_unfolded_again() -> None:
    """Attention kernels fold batch and heads into one dimension; its factors must survive."""
    model = _model("""
    <ir_version: 10, opset_import: ["" : 20]>
    fold (float[6, 32] x) => (float[2, 8, 5] y)
    <float[32, 32] k, float[12, 5] o, int64[4] split = {2, 3, 4, 8}, int64[3] fold = {8, 3, 8},
     int64[4] unfold = {2, 4, 8, 3}, int64[3] join = {2, 8, 12}>
    {
      h = Gemm <transB=1> (x, k)
      s = Reshape (h, split)
      t = Transpose <perm=[0, 2, 1, 3]> (s)
      f = Reshape (t, fold)
      u = Transpose <perm=[0, 2, 1]> (f)
      v = Reshape (u, unfold)
      w = Transpose <perm=[0, 2, 1, 3]> (v)
      j = Reshape (w, join)
      y = MatMul (j, o)
    }
    """)
    free_elastic_dims(model, {"k": (Elastic(HEADS), 8), "o": (Elastic(HEADS), 3)})
    assert _targets(model) == [[2, 3, -1, 8], [-1, 3, 8], [2, -1, 8, 3], [2, 8, -1]]


def test_nothing_elastic_nothing_changed() -> None:
    model = _model(SPLIT_HEADS)
    assert not free_elastic_dims(model, {})
    assert _targets(model) == [[2, 3, 4, 8], [6, 32]]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("h = Gemm <transB=1> (x, w)  y = LayerNormalization <axis=-1> (h, g)", "over an elastic dimension"),
        ("h = Gemm <transB=1> (x, w)  y = Add (h, c)", "meets one that does not shrink with it"),
        ("h = Gemm <transB=1> (x, w)  y = Relu (h)", "an output of the model would shrink"),
        ("h = Gemm <transB=1> (x, w)  y = MatMul (h, v)", "do not shrink together"),
        ("h = Gemm <transB=1> (x, w)  r = Reshape (h, cut)  y = MatMul (r, e)", "cuts through an elastic dimension"),
        ("h = Gemm <transB=1> (x, w)  y = CumSum (h, a)", "no rule for CumSum"),
    ],
)
def test_what_it_cannot_follow_is_named(body: str, problem: str) -> None:
    model = _model(f"""
    <ir_version: 10, opset_import: ["" : 20]>
    graph (float[6, 32] x) => (float y)
    <float[64, 32] w, float[64] g, float[6, 64] c, float[64, 5] v, float[16, 2] e, int64[2] cut = {{24, 16}},
     int64 a = {{1}}>
    {{ {body} }}
    """)
    with pytest.raises(SliceError, match=problem):
        free_elastic_dims(model, {"w": (Elastic(FFN),)})
