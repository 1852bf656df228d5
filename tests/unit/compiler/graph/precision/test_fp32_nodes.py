import onnx
import pytest
from nestforge.compiler.graph.precision.fp32_nodes import fp32_products, wide_nodes
from onnx import TensorProto
from support.derived_engines import parsed

ROUTED = parsed(
    """routed (float[2, 4] x) => (float[2, 4] y, int64[2, 1] route) <int64[1] one = {1}>
    {
      h = Gemm (x, up)
      a = Gelu (h)
      s = Gemm (a, router)
      p = Softmax (s)
      gate, route = TopK (p, one)
      o = Gemm (a, down)
      y = Mul (o, gate)
    }""",
    up=(4, 8),
    router=(8, 3),
    down=(8, 4),
)
GATED = parsed(
    """gated (float[2, 4] x) => (float[2, 4] y, int64[2, 1] route)
    <int64[1] one = {1}, float half = {0.5}, int64[1] last = {1}>
    {
      s = Gemm (x, router)
      best, route = TopK (s, one)
      peak = ReduceMax (s, last)
      below = Sub (s, peak)
      capped = Min (s, half)
      both = Add (below, capped)
      cool = Div (both, half)
      gates = Exp (cool)
      o = Gemm (x, up)
      a = Mul (o, o)
      y = Mul (a, gates)
    }""",
    router=(4, 4),
    up=(4, 4),
)
NORM = parsed(
    """norm (float[2, 4] x) => (float[2, 4] y) <float two = {2.0}, float epsilon = {0.00001}>
    {
      h = Gemm (x, up)
      square = Pow (h, two)
      mean = ReduceMean (square)
      safe = Add (mean, epsilon)
      root = Sqrt (safe)
      inverse = Reciprocal (root)
      normed = Mul (h, inverse)
      scaled = Mul (normed, scale)
      z = Gemm (scaled, down)
      y = Add (h, z)
    }""",
    up=(4, 4),
    scale=(4,),
    down=(4, 4),
)
ATTENTION = parsed(
    """attention (float[2, 3, 4] q, float[2, 4, 3] k, float[2, 3, 4] v, bool[2, 1, 3] keep) => (float[2, 3, 4] y)
    <float two = {2.0}, float zero = {0.0}, float low = {-1e38}>
    {
      scores = MatMul (q, k)
      scaled = Div (scores, two)
      mask = Where (keep, zero, low)
      masked = Add (scaled, mask)
      p = Softmax (masked)
      nan = IsNaN (p)
      guarded = Where (nan, zero, p)
      y = MatMul (guarded, v)
    }"""
)
POOLED = parsed(
    """pooled (int64[2, 3] ids, int64[2, 3, 1] mask) => (float[2, 4] y, float[2, 3, 4] h)
    <int64[1] axis = {1}, int64[2] flat = {6, 4}, int64[3] back = {2, 3, 4}>
    {
      e = Gather (table, ids)
      t = LayerNormalization (e, scale, shift)
      r = Reshape (t, flat)
      g = Gemm (r, up)
      h = Reshape (g, back)
      m = Cast <to=1> (mask)
      kept = Mul (t, m)
      total = ReduceSum <keepdims=0> (kept, axis)
      count = ReduceSum <keepdims=0> (m, axis)
      y = Div (total, count)
    }""",
    table=(9, 4),
    scale=(4,),
    shift=(4,),
    up=(4, 4),
)


def _wide(model: onnx.ModelProto, *outputs: str, lost: tuple[str, ...] = (), narrow: int = TensorProto.FLOAT16) -> str:
    found = wide_nodes(model, outputs, lost, narrow)
    return " ".join(node.output[0] for node in model.graph.node if node.output[0] in found)


@pytest.mark.parametrize(
    ("outputs", "kept"), [((), {"s"}), (("y",), {"s", "o"}), (("route",), {"s"}), (("elsewhere",), {"s"})]
)
def test_products_before_decisions_and_named_outputs_are_kept(outputs: tuple[str, ...], kept: set[str]) -> None:
    assert fp32_products(ROUTED, outputs) == kept


def test_a_comparison_of_numbers_decides_and_one_of_positions_does_not() -> None:
    text = """gate ({kind}[2, 4] x) => (bool[2, 4] y, float[2, 4] z) <float[4, 4] w = {{{ones}}}>
    {{ h = Gemm (x, w)  y = Less (h, h)  z = Identity (h) }}"""
    assert fp32_products(parsed(text.format(kind="float", ones=", ".join(["1.0"] * 16))), ()) == {"h"}
    places = parsed("p (int64[2] x) => (float[2, 4] z) { c = Equal (x, x)  f = Cast <to=1> (c)  z = MatMul (f, f) }")
    assert fp32_products(places, ()) == frozenset()


def test_router_scores_and_named_heads_are_wide() -> None:
    assert _wide(ROUTED) == "s p gate"
    assert _wide(ROUTED, "y") == "s p gate o y"


def test_gates_that_are_computed_of_scores_are_wide_up_to_what_they_weigh() -> None:
    assert _wide(GATED) == "s best peak below capped both cool gates y"


def test_a_norm_spelled_out_is_wide_until_it_meets_its_input() -> None:
    assert _wide(NORM) == "square mean safe root inverse normed"


def test_masks_are_added_wide_and_probabilities_are_not_multiplied_so() -> None:
    assert _wide(ATTENTION, lost=("low",)) == "scaled mask masked p"


def test_data_movement_is_as_wide_as_what_reads_it_where_it_may() -> None:
    """``r`` is read by a product alone; ``kept`` has both operands wide already. Embeddings are looked up narrow."""
    assert _wide(POOLED) == "t m kept total count y"


def test_what_reads_a_constant_that_would_be_lost_is_wide() -> None:
    model = parsed(
        """c (float[2, 4] x) => (float[2, 4] y) <float tiny = {1e-9}, float[4, 4] w = {1e6, 0.0, 0.0, 0.0, 0.0, 0.0,
        0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0}>
        { h = Gemm (x, w)  g = Gelu (h)  z = Gemm (g, v)  c = Clip (z, tiny)  y = Div (z, c) }""",
        v=(4, 4),
    )
    assert _wide(model) == ""
    assert _wide(model, lost=("w", "tiny")) == "h c y"


def test_an_operator_without_the_type_is_wide() -> None:
    """The opset of graphs has no Conv in bfloat16, and no family's other operators lack it."""
    model = parsed(
        "c (float[1, 2, 4, 4] x) => (float[1, 3, 3, 3] y) { g = Conv (x, w)  h = Gelu (g)  y = Conv (h, v) }",
        w=(3, 2, 2, 2),
        v=(3, 3, 1, 1),
    )
    assert _wide(model) == ""
    assert _wide(model, narrow=TensorProto.BFLOAT16) == "g h y"
