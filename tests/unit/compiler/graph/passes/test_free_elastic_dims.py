import numpy as np
import onnx
import onnx_ir as ir
import pytest
from nestforge.bucket import Bucket
from nestforge.compiler.graph.passes.dims_by_operator import Elastic
from nestforge.compiler.graph.passes.free_elastic_dims import (
    HeadAxes,
    free_elastic_dims,
    head_axes,
)
from nestforge.compiler.graph.template import Template, emit
from nestforge.elastic import Axis, ElasticSpec
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


def test_halves_of_a_head_are_turned_and_joined_again() -> None:
    """Rotary positions: heads stay elastic through Split, Slice and Concat of the head's own dimension."""
    model = _model("""
    <ir_version: 10, opset_import: ["" : 20]>
    turn (float[6, 32] x) => (float[6, 5] y)
    <float[32, 32] q, float[16, 5] o, int64[4] split = {2, 3, 4, 8}, int64[2] join = {6, 16},
     int64[1] zero = {0}, int64[1] four = {4}, int64[1] last = {-1}>
    {
      h = Gemm <transB=1> (x, q)
      s = Reshape (h, split)
      first, second = Split <axis=-1, num_outputs=2> (s)
      swapped = Concat <axis=-1> (second, first)
      back = Slice (swapped, zero, four, last)
      r = Mul (back, second)
      j = Reshape (r, join)
      y = MatMul (j, o)
    }
    """)
    assert free_elastic_dims(model, {"q": (Elastic(HEADS), 8), "o": (Elastic(HEADS), 4)})
    assert _targets(model) == [[2, 3, -1, 8], [6, -1]]


def test_numbers_of_elastic_heads_are_looked_up() -> None:
    """A bias per head and bucket of distances: the buckets of every query and key replace the dimension of buckets."""
    model = _model("""
    <ir_version: 10, opset_import: ["" : 20]>
    bias (float[2, 1, 3, 3] x) => (float[2, 3, 5] y)
    <float[4, 32] r, float[12, 5] o, int64[9] buckets = {0, 0, 0, 1, 0, 0, 2, 1, 0}, int64[3] square = {4, 3, 3},
     int64[3] join = {2, 3, 12}>
    {
      g = Gather <axis=-1> (r, buckets)
      s = Reshape (g, square)
      a = Add (x, s)
      t = Transpose <perm=[0, 2, 1, 3]> (a)
      j = Reshape (t, join)
      y = MatMul (j, o)
    }
    """)
    free_elastic_dims(model, {"r": (Elastic(HEADS),), "o": (Elastic(HEADS), 3)})
    assert _targets(model) == [[-1, 3, 3], [2, 3, -1]]


def test_a_table_of_heads_is_spread_over_positions() -> None:
    model = _model("""
    <ir_version: 10, opset_import: ["" : 20]>
    spread (float[2, 3, 1, 8] x) => (float[2, 3, 8] y)
    <float[4, 8] e, float[32, 8] o, int64[1] at = {1}, int64[3] join = {2, 3, 32}>
    {
      u = Unsqueeze (e, at)
      a = Transpose <perm=[1, 0, 2]> (u)
      h = Add (x, a)
      j = Reshape (h, join)
      y = MatMul (j, o)
    }
    """)
    assert free_elastic_dims(model, {"e": (Elastic(HEADS),), "o": (Elastic(HEADS), 8)})
    assert _targets(model) == [[2, 3, -1]]


def test_what_is_repeated_and_what_is_regrouped_on_the_way_keep_their_order() -> None:
    """12 rows are 3 times 4, the 3 slower, which no extent says."""
    model = _model("""
    <ir_version: 10, opset_import: ["" : 20]>
    rows (float[2, 32] x, float[2, 3, 4, 5] p) => (float[2, 3, 4] y)
    <float[64, 32] w, float[64, 1] v, int64[3] one = {2, 1, 64}, int64[3] ones = {1, 1, 1}, int64[3] five = {1, 5, 1},
     int64[3] fold = {2, 12, 5}, int64[4] unfold = {2, 3, 4, 64}, int64[2] flat = {24, 64}, int64[3] back = {2, 3, 4}>
    {
      h = Gemm <transB=1> (x, w)
      s = Reshape (h, one)
      e = Expand (s, ones)
      r = Tile (e, five)
      f = Reshape (p, fold)
      m = MatMul (f, r)
      u = Reshape (m, unfold)
      j = Reshape (u, flat)
      g = Gemm (j, v)
      y = Reshape (g, back)
    }
    """)
    assert free_elastic_dims(model, {"w": (Elastic(FFN),), "v": (Elastic(FFN),)})
    assert _targets(model) == [[2, 1, -1], [2, 12, 5], [2, 3, 4, -1], [24, -1], [2, 3, 4]]


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
        ("h = Gemm <transB=1> (x, w)  y = CumSum (h, a)", r"node y \(CumSum\): no rule for CumSum"),
        ("h = Gemm <transB=1> (x, w)  y = ReduceSum <keepdims=1> (h, one)", "no rule for ReduceSum"),
        ("h = Gemm <transB=1> (x, w)  y, z = Split <axis=1, num_outputs=2> (h)", "Split of an elastic dimension"),
        ("h = Gemm <transB=1> (x, w)  y = Slice (h, one, two, one)", "Slice of an elastic dimension"),
        ("h = Gemm <transB=1> (x, w)  y = Slice (h, one, two)", "input 3 is not constant"),
        ("h = Gemm <transB=1> (x, w)  y = Gather <axis=1> (h, a)", "Gather from, or by, an elastic dimension"),
        ("y = Gather (x, t)  h = Gather (w, t)", "Gather from, or by, an elastic dimension"),
        ("h = Gemm <transB=1> (x, w)  r = Cast <to=7> (h)  y = Gather (x, r)", "Gather from, or by, an elastic dim"),
        ("y = GatherND (w, k)", "GatherND from, or by, an elastic dimension"),
        ("h = Gemm <transB=1> (x, w)  y = Tile (h, t2)", "Tile of an elastic dimension"),
        ("h = Gemm <transB=1> (x, w)  y = Expand (h, t2)", "Expand of an elastic dimension"),
        ("h = Gemm <transB=1> (x, w)  y = Expand (h, one)", "input 1 is not constant, or changes the number of dim"),
        ("h = Gemm <transB=1> (x, w)  y = Concat <axis=1> (h, c)", "Concat of an elastic dimension"),
        ("h = Gemm <transB=1> (x, w)  y = Concat <axis=0> (h, c)", "Concat of an elastic dimension"),
    ],
)
def test_what_it_cannot_follow_is_named(body: str, problem: str) -> None:
    model = _model(f"""
    <ir_version: 10, opset_import: ["" : 20]>
    graph (float[6, 32] x) => (float y)
    <float[64, 32] w, float[64] g, float[6, 64] c, float[64, 5] v, float[16, 2] e, int64[2] cut = {{24, 16}},
     int64 a = {{1}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[2] t = {{0, 1}},
     int64[2] t2 = {{1, 2}}, int64[2, 1] k = {{0, 1}}>
    {{ {body} }}
    """)
    with pytest.raises(SliceError, match=problem):
        free_elastic_dims(model, {"w": (Elastic(FFN),)})


FOLLOWED = [
    f"a = {name} (h)" for name in ["HardSwish", "HardSigmoid", "LeakyRelu", "Mish", "Softplus", "Elu", "Log", "Sign"]
] + [
    # A mean or maximum is that of the extent that it finds, so a submodel's is taken over its own neurons.
    f"m = {name} <keepdims=1> (h, last)  a = Sub (h, m)"
    for name in ("ReduceMean", "ReduceMax")
]
FOLLOWED.append("a = GatherND (h, rows)")


@pytest.mark.parametrize("body", FOLLOWED)
def test_what_works_on_elements_alone_or_on_any_number_of_them_is_followed(body: str) -> None:
    text = f"""
<ir_version: 10, opset_import: ["" : 20]>
ffn (float[6, 32] x) => (float[6, 32] y)
<float[64, 32] up, float[64, 32] down, int64[1] last = {{-1}}, int64[6, 1] rows = {{5, 4, 3, 2, 1, 0}}>
{{ h = Gemm <transB=1> (x, up)  {body}  y = Gemm (a, down) }}
"""
    assert not free_elastic_dims(_model(text), {"up": (Elastic(FFN),), "down": (Elastic(FFN),)})


def test_a_graph_that_cannot_be_followed_is_left_as_it_was() -> None:
    """The problem comes behind the first Reshape, which could have been freed."""
    text = SPLIT_HEADS.replace("u = Transpose <perm=[0, 2, 1, 3]> (p)", "u = CumSum (p, split)")
    model = _model(text)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(SliceError, match=r"^node u \(CumSum\): no rule for CumSum on an elastic dimension"):
        free_elastic_dims(model, {"q": (Elastic(HEADS), 8), "o": (Elastic(HEADS), 8)})
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_queries_of_all_heads_as_rows_of_one() -> None:
    """Rows shrink with the heads; a number put behind those of each, and keys and values, do not."""
    text = """
    <ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
    one_head (float[2, 3, 1, 8] x, float[2, 3, 9] keys, float[2, 3, 6] values) => (float[6, 5] y)
    <float[4, 8] c, float[24, 5] o, int64[4] pads = {PADS}, int64[8] behind = {0, 0, 0, 0, 0, 0, 0, 1},
     int64[3] rows = {2, 12, 9}, int64[2] join = {6, 24}>
    {
      t = Pad (c, pads)
      s = Pad (x, behind)
      q = Mul (s, t)
      r = Reshape (q, rows)
      a = com.microsoft.MultiHeadAttention <num_heads=1> (r, keys, values)
      j = Reshape (a, join)
      y = Gemm (j, o)
    }
    """
    seeds = {"c": (Elastic(HEADS),), "o": (Elastic(HEADS), 6)}
    model = _model(text.replace("PADS", "0, 0, 0, 1"))
    joined = next(node for node in model.graph if node.op_type == "Gemm").inputs[0]
    joined.shape = ir.Shape([6, 24])  # the checker does not know the operator
    assert free_elastic_dims(model, seeds)
    assert _targets(model) == [[2, -1, 9], [6, -1]]
    with pytest.raises(SliceError, match="Pad of an elastic dimension"):
        free_elastic_dims(_model(text.replace("PADS", "1, 0, 0, 1")), seeds)


SEEDS = {name: (Elastic(HEADS), 8) for name in ("q", "k")}
ATTENTION = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
attend (float[1, 1, 32] x, float[1, 4, C, 8] past_key, float[1, 4, C, 8] past_value, int32[1] last, int32 total,
        float[1, 4, 1, T] bias)
    => (float[1, 1, 32] y, float[1, 4, C, 8] present_key, float[1, 4, C, 8] present_value)
<float[32, 32] q, float[32, 32] k, float[32, 32] o, int64[2] rows = {1, 32}, int64[3] wide = {1, 1, 32}>
{
  flat = Reshape (x, rows)
  queries = Gemm <transB=1> (flat, q)
  keys = Gemm <transB=1> (flat, k)
  a = Reshape (queries, wide)
  b = Reshape (keys, wide)
  found, present_key, present_value = com.microsoft.GroupQueryAttention <num_heads=4, kv_num_heads=4>
    (a, b, b, past_key, past_value, last, total)
  s = Reshape (found, rows)
  t = Gemm (s, o)
  y = Reshape (t, wide)
}
"""


def model(text: str = ATTENTION) -> ir.Model:
    """The checker does not know the operator, nor what follows it."""
    found = _model(text)
    for node in found.graph:
        if node.op_type == "GroupQueryAttention":
            node.outputs[0].shape = ir.Shape([1, 1, 32])
        if node.outputs[0].name == "s":
            node.outputs[0].shape = ir.Shape([1, 32])
    return found


def emitted(own: ir.Model, heads: dict[str, HeadAxes], dims: dict[str, dict[int, str]], size: int) -> onnx.ModelProto:
    """The graph of a submodel with so many heads."""
    template = Template(Bucket(1, 16), ir.to_proto(own), {}, None, heads=heads, dims=dims)
    return onnx.ModelProto.FromString(emit(template, {}, ElasticSpec((HEADS,), ()).submodel({HEADS.name: size})))


def named(found: dict[ir.Value, HeadAxes]) -> dict[str, HeadAxes]:
    return {value.name or "": axes for value, axes in found.items()}


def test_heads_that_shrink_are_found_and_set() -> None:
    own = model()
    seeds = {**SEEDS, "o": (Elastic(HEADS), 8)}
    axes = named(head_axes(own, seeds))
    assert axes == {"found": HeadAxes(HEADS.name, HEADS.name)}
    kept = ("past_key", "past_value", "present_key", "present_value")
    proto = emitted(own, axes, {name: {1: HEADS.name} for name in kept}, 3)
    (attention,) = (node for node in proto.graph.node if node.op_type == "GroupQueryAttention")
    assert {attribute.name: attribute.i for attribute in attention.attribute} == {"num_heads": 3, "kv_num_heads": 3}
    heads = {
        tensor.name: tensor.type.tensor_type.shape.dim[1].dim_value
        for tensor in (*proto.graph.input, *proto.graph.output)
        if "_" in tensor.name
    }
    assert heads == dict.fromkeys(kept, 3)


def test_heads_of_queries_alone_leave_the_cache_as_it_is() -> None:
    own = model()
    axes = named(head_axes(own, {"q": (Elastic(HEADS), 8), "o": (Elastic(HEADS), 8)}))
    assert axes == {"found": HeadAxes(HEADS.name, None)}
    proto = emitted(own, axes, {}, 1)
    (attention,) = (node for node in proto.graph.node if node.op_type == "GroupQueryAttention")
    assert {attribute.name: attribute.i for attribute in attention.attribute} == {"num_heads": 1, "kv_num_heads": 4}
    assert proto.graph.input[1].type.tensor_type.shape.dim[1].dim_value == 4


def test_nothing_shrinks_of_a_model_without_elastic_heads() -> None:
    assert head_axes(model(), {}) == {}


def test_a_bias_that_keeps_its_heads_is_refused() -> None:
    text = ATTENTION.replace("last, total)\n", "last, total, x, x, x, bias)\n")
    with pytest.raises(SliceError, match="a bias whose heads do not shrink with the queries'"):
        head_axes(model(text), {**SEEDS, "o": (Elastic(HEADS), 8)})


def test_sizes_of_heads_that_shrink_are_read_off_the_inputs() -> None:
    """As many heads as before, each narrower: no attribute says how wide."""
    assert head_axes(model(), {name: (4, Elastic(Axis("layers.0.size", 8))) for name in ("q", "k", "o")}) == {}


def test_what_is_neither_heads_nor_their_size_is_refused() -> None:
    seeds = {name: (2, Elastic(Axis("layers.0.some", 2)), 8) for name in ("q", "k", "o")}
    with pytest.raises(SliceError, match="what shrinks of input 0 is not its heads"):
        head_axes(model(), seeds)


def test_sizes_of_heads_that_are_turned_by_tables_may_not_shrink() -> None:
    text = ATTENTION.replace("last, total)\n", "last, total, angles, angles, places)\n")
    turned = model(text.replace("int32 total,", "int32 total, float[9, 4] angles, int64[1, 1] places,"))
    assert head_axes(turned, SEEDS | {"o": (Elastic(HEADS), 8)})
    with pytest.raises(SliceError, match="node found: heads turned by tables, whose size shrinks"):
        head_axes(turned, {name: (4, Elastic(Axis("layers.0.size", 8))) for name in ("q", "k", "o")})
