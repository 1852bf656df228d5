"""Nodes fused in KV-cache engines: norms, products of one value, and what attention reads of them."""

from collections.abc import Collection, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nestforge.compiler.graph.passes.fuse_nodes import fuse_norms, join_products, pack_attention
from support.graphs import kinds, passed, require_same

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


@pytest.mark.parametrize(
    ("old", "new"), [("", ""), ("Mul (x, r)", "Mul (r, x)"), ("Mul (w, n)", "Mul (n, w)"), ("{-1}", "{2}")]
)
def test_a_layer_keeps_its_function_in_fewer_nodes(old: str, new: str) -> None:
    before, after, _ = passed(fuse_norms, LAYER.replace(old, new))
    assert kinds(after) == {"SkipSimplifiedLayerNormalization": 1, "QuickGelu": 1, "Mul": 1}
    require_same(before, after, atol=2e-6)


@pytest.mark.parametrize(
    ("old", "new", "sums"), [("Add (a, b)", "Abs (a)", {"Abs": 1}), ("float[2, 3, 8] b", "float[8] b", {"Add": 1})]
)
def test_a_norm_of_no_sum_of_two_like_it_is_one_of_its_own(old: str, new: str, sums: dict[str, int]) -> None:
    before, after, _ = passed(fuse_norms, LAYER.replace(old, new))
    assert kinds(after) == {**sums, "SimplifiedLayerNormalization": 1, "QuickGelu": 1, "Mul": 1}
    require_same(before, after, atol=2e-6)


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
    _, after, _ = passed(fuse_norms, LAYER.replace(old, new))
    assert kinds(after) == {"Add": 2, "Pow": 1, "ReduceMean": 1, "Sqrt": 1, "Reciprocal": 1, "Mul": 3, "QuickGelu": 1}


def test_a_weight_that_is_made_behind_the_sum_is_there_in_time() -> None:
    before, after, _ = passed(
        fuse_norms, LAYER.replace("  n = Mul", "  v = Abs (w)\n  n = Mul").replace("Mul (w, n)", "Mul (v, n)")
    )
    assert kinds(after)["SkipSimplifiedLayerNormalization"] == 1
    known = {value.name for value in (*after.graph.input, *after.graph.initializer)}
    for node in after.graph.node:
        assert known >= set(node.input), node.op_type
        known.update(node.output)
    require_same(before, after, atol=2e-6)


# Queries, keys and values of the same tokens, and a product of what they make.
PRODUCTS = """
<ir_version: 10, opset_import: ["" : 20]>
agraph (float[5, 4] x) => (float[5, 4] y)
{
  q = Gemm <transB = 1> (x, wq, bq)
  k = Gemm <transB = 1> (x, wk, bk)
  v = Gemm <transB = 1> (x, wv, bv)
  seen = Mul (k, v)
  wide = Concat <axis = 1> (seen, q)
  y = Gemm <transB = 1> (wide, wo)
}
"""
RNG = np.random.default_rng(0)
SHAPES = {"wq": (24, 4), "wk": (16, 4), "wv": (16, 4), "wo": (4, 40), "bq": (24,), "bk": (16,), "bv": (16,)}
WEIGHTS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def joined(
    text: str = PRODUCTS, parameters: Collection[str] = frozenset(SHAPES), weights: Mapping[str, np.ndarray] = WEIGHTS
) -> tuple[onnx.ModelProto, ir.Model, set[str]]:
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    before = onnx.shape_inference.infer_shapes(proto)
    model = ir.from_proto(before)
    changed, names = (
        join_products(model, parameters),
        {n for n in model.graph.initializers if "+" in n and not n.endswith(".rows")},
    )
    assert changed == bool(names)
    return before, model, names


def require_same_product(before: onnx.ModelProto, model: ir.Model) -> None:
    x = RNG.standard_normal((5, 4)).astype(np.float32)
    runs = (onnxruntime.InferenceSession(proto.SerializeToString()) for proto in (before, ir.to_proto(model)))
    expected, found = (session.run(None, {"x": x})[0] for session in runs)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_products_of_one_value_are_one_over_weights_side_by_side() -> None:
    before, model, found = joined()
    assert kinds(ir.to_proto(model)) == {"Gemm": 2, "Split": 1, "Mul": 1, "Concat": 1}
    assert found == {"wq+wk+wv", "bq+bk+bv"}
    weight = model.graph.initializers["wq+wk+wv"].const_value
    np.testing.assert_array_equal(weight.numpy(), np.concatenate([WEIGHTS[name] for name in ("wq", "wk", "wv")]))
    assert not {"wq", "wk", "wv", "bq", "bk", "bv"} & model.graph.initializers.keys()
    (split,) = (node for node in model.graph if node.op_type == "Split")
    assert [value.name for value in split.outputs] == ["q", "k", "v"]
    require_same_product(before, model)


def test_products_with_a_bias_and_those_without_are_joined_apart() -> None:
    before, model, found = joined(PRODUCTS.replace("(x, wk, bk)", "(x, wk)").replace("(x, wv, bv)", "(x, wv)"))
    assert found == {"wk+wv"}
    assert kinds(ir.to_proto(model)) == {"Gemm": 3, "Split": 1, "Mul": 1, "Concat": 1}
    require_same_product(before, model)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Gemm <transB = 1> (x, wk", "Gemm <transB = 1, alpha = 2.0> (x, wk"),
        ("  k = Gemm <transB = 1> (x,", "  other = Neg (x)\n  k = Gemm <transB = 1> (other,"),
        ("(k, v)", "(k, v)\n  again = MatMul (k, wk)"),  # something else reads the weight
    ],
    ids=["a factor", "another value", "a weight read twice"],
)
def test_what_is_no_such_product_stays(old: str, new: str) -> None:
    text = PRODUCTS.replace(old, new)
    assert text != PRODUCTS
    before, model, found = joined(text)
    assert found == {"wq+wv", "bq+bv"}
    require_same_product(before, model)


def test_what_is_no_joinable_parameter_stays() -> None:
    """As what an axis cuts."""
    _, model, found = joined(parameters=WEIGHTS.keys() - {"wk", "bv"})
    assert found == set()
    assert kinds(ir.to_proto(model))["Gemm"] == 4


def test_what_is_too_short_for_integers_is_not_joined() -> None:
    """Keys of 15 outputs and as many values: as they are, no precision changes them, and none has a scale for them."""
    narrow = {name: array[..., :39] if name == "wo" else array for name, array in WEIGHTS.items()}
    narrow |= {name: WEIGHTS[name][:15] for name in ("wk", "wv", "bk", "bv")}
    before, model, found = joined(weights=narrow)
    assert found == set()
    assert kinds(ir.to_proto(model))["Gemm"] == 4
    require_same_product(before, model)


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


def attended(proto: onnx.ModelProto) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (1, 3, 64), "past_key": (1, 2, 12, 8), "past_value": (1, 2, 12, 8)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    places = {"last": np.array([7], np.int32), "total": np.array(8, np.int32)}
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return session.run(None, {**feeds, **places})


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
    before, after, changed = passed(pack_attention, text)
    assert changed
    assert kinds(after) == left
    assert list(after.graph.node[-1].input[1:3]) == ["", ""]
    for found, expected in zip(attended(after), attended(before), strict=True):
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
    _, after, changed = passed(pack_attention, text)
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
    _, after, changed = passed(pack_attention, text)
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
    _, after, changed = passed(pack_attention, text)
    assert not changed
    assert kinds(after)["Split"] == 1
