from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nestforge.compiler.graph.passes.simplify_attention import pick_tokens, simplify_attention
from onnx_ir.passes.common import RemoveUnusedNodesPass

ATTENTION = """
<ir_version: 10, opset_import: ["" : 20]>
attention (float[2, 6, 4, 8] q, float[2, 6, 4, 8] k, float[2, 4, 6, 8] v, bool[2, 1, 1, 6] keep)
  => (float[2, 4, 6, 8] y)
<int64[3] fold = {8, 6, 8}, int64[4] unfold = {2, 4, 8, 6}, float scale = {0.6}, float zero = {0.0},
 float low = {-1e30}>
{
  qt = Transpose <perm=[0, 2, 1, 3]> (q)
  kt = Transpose <perm=[0, 2, 1, 3]> (k)
  kf = Reshape (kt, fold)
  ks = Transpose <perm=[0, 2, 1]> (kf)
  ku = Reshape (ks, unfold)
  qs = Mul (qt, scale)
  kk = Mul (ku, scale)
  s = MatMul (qs, kk)
  m = Where (keep, zero, low)
  a = Add (s, m)
  p = Softmax <axis=-1> (a)
  n = IsNaN (p)
  g = Where (n, zero, p)
  y = MatMul (g, v)
}
"""
# Something between the split of heads and the detour, as where keys are turned by their positions.
TURNED = ATTENTION.replace(
    "kt = Transpose <perm=[0, 2, 1, 3]> (k)", "kr = Transpose <perm=[0, 2, 1, 3]> (k)\n  kt = Relu (kr)"
)


def _simplified(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto, bool]:
    before = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    model = ir.from_proto(before)
    changed = simplify_attention(model)
    RemoveUnusedNodesPass()(model)
    return before, ir.to_proto(model), changed


def _run(model: onnx.ModelProto) -> np.ndarray:
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in {"q": (2, 6, 4, 8), "k": (2, 6, 4, 8), "v": (2, 4, 6, 8)}.items()
    }
    feeds["keep"] = np.array([1, 1, 1, 1, 0, 0] * 2, bool).reshape(2, 1, 1, 6)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def test_attention_keeps_its_function_and_loses_its_detours() -> None:
    before, after, changed = _simplified(ATTENTION)
    assert changed
    kinds = Counter(node.op_type for node in after.graph.node)
    assert kinds == {"Transpose": 2, "Mul": 1, "MatMul": 2, "Where": 1, "Add": 1, "Softmax": 1, "Constant": 1}
    np.testing.assert_allclose(_run(after), _run(before), atol=1e-6, rtol=1e-5)


def test_the_guard_stays_where_a_whole_row_can_be_minus_infinity() -> None:
    _, after, _ = _simplified(ATTENTION.replace("{-1e30}", "{-inf}"))
    assert "IsNaN" in {node.op_type for node in after.graph.node}


def test_the_guard_stays_where_the_mask_is_unknown() -> None:
    text = ATTENTION.replace("bool[2, 1, 1, 6] keep", "float[2, 1, 1, 6] m").replace(
        "m = Where (keep, zero, low)\n", ""
    )
    _, after, _ = _simplified(text)
    assert "IsNaN" in {node.op_type for node in after.graph.node}


def test_scales_that_are_not_constants_stay() -> None:
    text = ATTENTION.replace("kk = Mul (ku, scale)", "kk = Mul (ku, ku)")
    _, after, _ = _simplified(text)
    assert Counter(node.op_type for node in after.graph.node)["Mul"] == 2


def test_keys_that_were_turned_by_their_positions_are_transposed_once() -> None:
    """Between the split of heads and the detour stands the rotation; only the detour goes."""
    before, after, _ = _simplified(TURNED)
    kinds = Counter(node.op_type for node in after.graph.node)
    assert (kinds["Transpose"], kinds["Reshape"], kinds["Relu"]) == (3, 0, 1)
    np.testing.assert_allclose(_run(after), _run(before), atol=1e-6, rtol=1e-5)


# ``x[:, at]`` as the exporter writes it.
PICK = """
<ir_version: 10, opset_import: ["" : 20]>
agraph (float[2, 5, 3] x, int64[4] at) => (float[2, 4, 3] y)
<int64[1] behind = {-1}>
{
  front = Transpose <perm = [1, 0, 2]> (x)
  numbers = Unsqueeze (at, behind)
  some = GatherND <batch_dims = 0> (front, numbers)
  y = Transpose <perm = [1, 0, 2]> (some)
}
"""


def picked(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto, bool]:
    before = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    model = ir.from_proto(before)
    changed = pick_tokens(model)
    RemoveUnusedNodesPass()(model)
    return before, ir.to_proto(model), changed


def test_tokens_are_picked_by_one_node() -> None:
    before, after, changed = picked(PICK)
    assert changed
    assert Counter(node.op_type for node in after.graph.node) == {"Gather": 1}
    feeds = {"x": np.arange(30, dtype=np.float32).reshape(2, 5, 3), "at": np.array([4, 0, -1, 2])}
    found = [onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)[0] for proto in (before, after)]
    np.testing.assert_array_equal(found[0], feeds["x"][:, feeds["at"]])
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y = Transpose <perm = [1, 0, 2]>", "y = Transpose <perm = [0, 1, 2]>"),
        ("front = Transpose <perm = [1, 0, 2]>", "front = Transpose <perm = [1, 2, 0]>"),
        ("{-1}", "{0}"),
        ("int64[4] at", "int64[4, 1] at"),
    ],
)
def test_what_picks_otherwise_is_left(old: str, new: str) -> None:
    text = PICK.replace(old, new)
    assert text != PICK
    proto = onnx.parser.parse_model(text)
    assert not pick_tokens(ir.from_proto(onnx.shape_inference.infer_shapes(proto)))
