from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nestforge.compiler.graph.passes.cached.fuse_rotary import fuse_rotary
from onnx_ir.passes.common import RemoveUnusedNodesPass

# Two rows with three new tokens, two heads of 8; values are the keys before they are turned. The operator over the
# cache is replaced by what shows its inputs.
ROTARY = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
agraph (int64[2, 3] ids, int64[2, 3] positions, float[2, 3, 2, 8] q, float[2, 3, 2, 8] k) => (float[2, 3, 16] y)
<float[4] rates = {1.0, 0.5, 0.25, 0.1}, float[4] others = {1.0, 0.4, 0.2, 0.1}, float scale = {1.2},
 int64[1] last = {2}, int64[1] heads = {1}, int64[1] width = {3}, int64[3] flat = {2, 3, 16},
 int64[1] zero = {0}, int64[1] middle = {4}, int64[1] end = {9223372036854775807}, int64[1] step = {1}>
{
  at = Unsqueeze (positions, last)
  number = Cast <to = 1> (at)
  half = Mul (number, rates)
  other = Mul (number, others)
  angles = Concat <axis = -1> (half, half)
  cosine = Cos (angles)
  c = Mul (cosine, scale)
  sine = Sin (angles)
  s = Mul (sine, scale)
  cu = Unsqueeze (c, heads)
  su = Unsqueeze (s, heads)
  qt = Transpose <perm = [0, 2, 1, 3]> (q)
  q1 = Slice (qt, zero, middle, width, step)
  q2 = Slice (qt, middle, end, width, step)
  qn = Neg (q2)
  qr = Concat <axis = -1> (qn, q1)
  qc = Mul (qt, cu)
  qs = Mul (qr, su)
  qa = Add (qc, qs)
  qb = Transpose <perm = [0, 2, 1, 3]> (qa)
  qf = Reshape (qb, flat)
  kt = Transpose <perm = [0, 2, 1, 3]> (k)
  k1 = Slice (kt, zero, middle, width, step)
  k2 = Slice (kt, middle, end, width, step)
  kn = Neg (k2)
  kr = Concat <axis = -1> (kn, k1)
  kc = Mul (kt, cu)
  ks = Mul (kr, su)
  ka = Add (kc, ks)
  kb = Transpose <perm = [0, 2, 1, 3]> (ka)
  kf = Reshape (kb, flat)
  y = com.microsoft.GroupQueryAttention (qf, kf)
}
"""


def fused(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto, Counter[str]]:
    before = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    model = ir.from_proto(before)
    fuse_rotary(model)
    RemoveUnusedNodesPass()(model)
    return before, ir.to_proto(model), Counter(node.op_type for node in model.graph)


def run(model: onnx.ModelProto, positions: int = 2) -> np.ndarray:
    """What the queries are minus what the keys are, at the positions of so many rows."""
    model.graph.node[-1].op_type, model.graph.node[-1].domain = "Sub", ""
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 3, 2, 8)).astype(np.float32) for name in ("q", "k")}
    feeds |= {"ids": np.zeros((2, 3), np.int64), "positions": np.array([[0, 1, 2], [4, 7, 5]])[:positions]}
    left = {value.name for value in model.graph.input}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    found: np.ndarray = session.run(None, {name: array for name, array in feeds.items() if name in left})[0]
    return found


def test_queries_and_keys_are_turned_by_one_node_each() -> None:
    before, after, kinds = fused(ROTARY)
    assert kinds["RotaryEmbedding"] == 2
    assert not kinds.keys() & {"Neg", "Transpose", "Add"}
    assert (kinds["Cos"], kinds["Sin"], kinds["Slice"], kinds["Flatten"], kinds["Range"]) == (1, 1, 2, 2, 1)
    np.testing.assert_allclose(run(after), run(before), atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Concat <axis = -1> (half, half)", "Concat <axis = -1> (half, other)"),
        ("Mul (number, rates)\n", "Mul (number, rates)\n  wide = Concat <axis = -1> (half, half)\n"),
        ("(qn, q1)", "(q1, qn)"),
        ("Slice (qt, middle, end", "Slice (qt, zero, middle"),
        ("Mul (qr, su)", "Mul (qr, cu)"),
    ],
)
def test_what_is_turned_in_another_way_keeps_its_function(old: str, new: str) -> None:
    text = ROTARY.replace(old, new)
    if "wide" in new:  # both halves alike, but not the angles of one position
        text = text.replace("Cos (angles)", "Abs (wide)")
    before, after, kinds = fused(text)
    assert kinds["RotaryEmbedding"] < 2 or old == "Mul (qr, su)"
    np.testing.assert_allclose(run(after), run(before), atol=1e-6)


def test_angles_that_all_rows_have_in_common_are_left() -> None:
    """The operator would read those of the second row behind the end."""
    text = ROTARY.replace("int64[2, 3] positions", "int64[1, 3] positions")
    before, after, kinds = fused(text)
    assert not kinds["RotaryEmbedding"]
    np.testing.assert_allclose(run(after, positions=1), run(before, positions=1), atol=1e-6)


def test_tokens_that_are_not_those_of_the_first_input_are_left() -> None:
    before, after, kinds = fused(ROTARY.replace("int64[2, 3] ids", "int64[6, 1] ids"))
    assert not kinds["RotaryEmbedding"]
    assert after.graph.node[-1].input == before.graph.node[-1].input
