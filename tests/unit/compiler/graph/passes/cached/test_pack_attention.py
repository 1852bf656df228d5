from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nestforge.compiler.graph.passes.cached.pack_attention import pack_attention
from onnx_ir.passes.common import RemoveUnusedNodesPass

# Four heads of queries that share two of keys and values, of size 8, over a cache of 12 tokens; rows and tokens are one
# dimension in front of a Split, as behind a joined product.
ATTENTION = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
agraph (float[1, 3, 64] x, float[1, 2, 12, 8] past_key, float[1, 2, 12, 8] past_value, int32[1] last, int32 total)
    => (float[1, 3, 32] y, float[1, 2, 12, 8] key, float[1, 2, 12, 8] value)
<int64[3] widths = {32, 16, 16}, int64[3] wide = {1, 3, 32}, int64[3] narrow = {1, 3, 16}>
{
  flat = Flatten <axis = 2> (x)
  fq, fk, fv = Split <axis = -1> (flat, widths)
  q = Reshape (fq, wide)
  k = Reshape (fk, narrow)
  v = Reshape (fv, narrow)
  y, key, value = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2, local_window_size = 4>
      (q, k, v, past_key, past_value, last, total)
}
"""
# The same without flattening.
_SPLIT = "  q, k, v = Split <axis = 2> (x, widths)\n"
WHOLE = ATTENTION[: ATTENTION.index("  flat")] + _SPLIT + ATTENTION[ATTENTION.index("  y, key") :]
# And taken apart by Slices.
SLICES = WHOLE.replace(
    _SPLIT,
    """
  q = Slice (x, from, one, at)
  k = Slice (x, one, other, at)
  v = Slice (x, other, all, at, step)
""",
).replace(
    "<int64[3] widths",
    """<int64[1] from = {0}, int64[1] one = {32}, int64[1] other = {48},
 int64[1] all = {999}, int64[1] at = {2}, int64[1] step = {1}, int64[3] widths""",
)


def packed(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto, bool]:
    before = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    model = ir.from_proto(before)
    changed = pack_attention(model)
    RemoveUnusedNodesPass()(model)
    return before, ir.to_proto(model), changed


def kinds(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in proto.graph.node if node.op_type != "Constant")


def run(proto: onnx.ModelProto) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (1, 3, 64), "past_key": (1, 2, 12, 8), "past_value": (1, 2, 12, 8)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    places = {"last": np.array([7], np.int32), "total": np.array(8, np.int32)}
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    found: list[np.ndarray] = session.run(None, {**feeds, **places})
    return found


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (ATTENTION, {"Flatten": 1, "Reshape": 1, "GroupQueryAttention": 1}),
        (WHOLE, {"GroupQueryAttention": 1}),
        (SLICES, {"GroupQueryAttention": 1}),
    ],
    ids=["flattened", "whole", "slices"],
)
def test_what_lies_side_by_side_is_one_input(text: str, left: dict[str, int]) -> None:
    before, after, changed = packed(text)
    assert changed
    assert kinds(after) == left
    assert list(after.graph.node[-1].input[1:3]) == ["", ""]
    for found, expected in zip(run(after), run(before), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(q, k, v,", "(q, v, k,"),
        ("(q, k, v,", "(q, k, k,"),
        ("  y, key", "  other = Neg (fk)\n  y, key"),
        ("  q = Reshape (fq, wide)", "  bent = Tanh (fq)\n  q = Reshape (bent, wide)"),
        ("{32, 16, 16}", "{16, 32, 16}"),
    ],
    ids=["another order", "keys for values", "a part read twice", "something between", "other widths"],
)
def test_what_is_no_such_split_stays(old: str, new: str) -> None:
    text = ATTENTION.replace(old, new)
    assert text != ATTENTION
    _, after, changed = packed(text)
    assert not changed
    assert kinds(after)["Split"] == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("one = {32}", "one = {24}"),
        ("all = {999}", "all = {56}"),
        ("step = {1}", "step = {2}"),
        ("k = Slice (x,", "k = Slice (past,"),
    ],
    ids=["overlapping", "not to the end", "every other", "of another value"],
)
def test_slices_that_do_not_follow_each_other_stay(old: str, new: str) -> None:
    text = SLICES.replace(old, new).replace("  q = Slice", "  past = Neg (x)\n  q = Slice")
    assert text != SLICES
    _, after, changed = packed(text)
    assert not changed
    assert kinds(after)["Slice"] == 3


def test_heads_that_each_have_their_own_part_of_every_kind_stay() -> None:
    """As where one product returns queries, keys and values head by head: a Split takes them apart within each head."""
    text = ATTENTION[: ATTENTION.index("  flat")] + ATTENTION[ATTENTION.index("  y, key") :]
    for old, new in [
        ("float[1, 3, 64] x", "float[1, 3, 2, 24] x"),
        ("float[1, 3, 32] y", "float[1, 3, 16] y"),
        ("{32, 16, 16}", "{8, 8, 8}"),
        ("num_heads = 4, ", "num_heads = 2, "),
        ("  y, key", "  fq, fk, fv = Split <axis = -1> (x, widths)\n  y, key"),
        ("  y, key", "".join(f"  {kind} = Reshape (f{kind}, narrow)\n" for kind in "qkv") + "  y, key"),
    ]:
        assert old in text
        text = text.replace(old, new)
    _, after, changed = packed(text)
    assert not changed
    assert kinds(after)["Split"] == 1
