from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
from nestforge.compiler.graph.precision.proof_graphs import exact
from nestforge.compiler.graph.precision.whole_rows import in_whole_rows, ranks_of, reshape_targets, rows_of

# A product whose rows are scaled at run time between two sums in rows, behind what reads a cache (its outputs are not
# used), and an output [B, S, H].
ENGINE = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
agraph (float[2, 3, 32] x) => (float[2, 3, 16] y)
<int64[1] two = {2}, int64[1] three = {3}, int64[1] last = {16}, float half = {0.5},
 int64[1] width = {-1}, float s = {0.0078}, uint8 z = {128}>
{
  flat = Flatten <axis = 2> (x)
  bent = Mul (flat, half)
  sizes = Abs (bent)
  largest = ReduceMax (sizes, width)
  units = Div (bent, largest)
  q = QuantizeLinear (units, s, z)
  sums = com.microsoft.QGemm <transB = 0> (q, s, z, w, scale, zero)
  product = Mul (sums, largest)
  more = Add (product, half)
  target = Concat <axis = 0> (two, three, last)
  y = Reshape (more, target)
}
"""
# Scaled rows, and the two sums.
ROWS = {"Mul": 2, "Abs": 1, "ReduceMax": 1, "Div": 1, "QuantizeLinear": 1}
RNG = np.random.default_rng(0)
TENSORS = {
    "w": RNG.integers(-63, 64, (32, 16)).astype(np.int8),
    "scale": RNG.random(16, np.float32),
    "zero": np.zeros(16, np.int8),
    "bias": np.zeros(16, np.float32),
}


def parsed(text: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in TENSORS.items())
    # Engines that keep no cache are left alone; this node makes it one, and is dropped before it runs.
    attention = onnx.helper.make_node("GroupQueryAttention", ["x"], ["unused"], domain="com.microsoft")
    proto.graph.node.insert(0, attention)
    return proto


def run(proto: onnx.ModelProto) -> np.ndarray:
    kept = [node for node in proto.graph.node if node.op_type != "GroupQueryAttention"]
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    x = np.random.default_rng(1).standard_normal((2, 3, 32)).astype(np.float32)
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0]


def kinds(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in proto.graph.node if node.op_type != "GroupQueryAttention")


def test_products_take_rows_and_tokens_as_they_are() -> None:
    found = in_whole_rows(parsed(ENGINE))
    assert kinds(found) == {**ROWS, "MatMulIntegerToFloat": 1, "Add": 1}
    np.testing.assert_allclose(run(found), run(parsed(ENGINE)), rtol=1e-6)


def test_without_the_rounding_of_activations_it_is_the_product() -> None:
    plain, whole = (
        onnx.ModelProto.FromString(exact(proto.SerializeToString()))
        for proto in (parsed(ENGINE), in_whole_rows(parsed(ENGINE)))
    )
    floats = {kind: count for kind, count in ROWS.items() if kind != "QuantizeLinear"}
    assert kinds(whole) == {**floats, "Max": 1, "DequantizeLinear": 1, "MatMul": 1, "Add": 1}
    np.testing.assert_allclose(run(whole), run(plain), rtol=1e-5, atol=1e-4)


def test_a_graph_with_what_wants_rows_alone_stays_as_it_is() -> None:
    gathered = ENGINE.replace("Add (product, half)", "Softmax <axis = 0> (product)")
    assert in_whole_rows(parsed(gathered)) == parsed(gathered)
    transposed = ENGINE.replace("transB = 0", "transB = 1")
    assert in_whole_rows(parsed(transposed)) == parsed(transposed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Concat <axis = 0> (two, three, last)", "Concat <axis = 0> (three, two, last)\n  first = Identity (two)"),
        ("int64[1] last = {16}", "int64[1] last = {8}"),
        ("Flatten <axis = 2> (x)", "Flatten <axis = 2> (unknown)"),
        ("Add (product, half)", "Add (product, each)"),
        ("(q, s, z, w, scale, zero)", "(q, s, z, w, scale, zero, bias)"),
        ("int64[1] width = {-1}", "int64[1] width = {0}"),
        ("ReduceMax (sizes", "ReduceMax <keepdims = 0> (sizes"),
    ],
    ids=[
        *("rows and tokens exchanged", "another width", "unknown dimensions", "a number for each row", "a bias"),
        *("the largest of all rows", "a dimension less"),
    ],
)
def test_a_graph_whose_rows_come_back_in_another_way_stays_as_it_is(old: str, new: str) -> None:
    text = ENGINE.replace(old, new)
    assert text != ENGINE
    text = text.replace("{\n  flat", "{\n  unknown = Expand (x, one)\n  flat")
    text = text.replace("<int64[1] two", "<float[6, 1] each = {1, 2, 3, 4, 5, 6}, int64[1] one = {1}, int64[1] two")
    assert in_whole_rows(parsed(text)) == parsed(text)


def test_heads_apart_come_together_in_front_of_a_product() -> None:
    text = ENGINE.replace("Flatten <axis = 2> (x)", "Flatten <axis = 2> (apart)")
    text = text.replace("{\n  flat", "{\n  apart = Reshape (x, four)\n  flat")
    text = text.replace("<int64[1] two", "<int64[4] four = {2, 3, 4, 8}, int64[1] two")
    found = in_whole_rows(parsed(text))
    assert kinds(found) == {**ROWS, "Reshape": 2, "MatMulIntegerToFloat": 1, "Add": 1}
    np.testing.assert_allclose(run(found), run(parsed(text)), rtol=1e-6)


def test_rows_of_one_text_and_answers_of_another_are_told_apart() -> None:
    """The head answers at fewer places than there are tokens; both come back as they went in, or nothing is changed."""
    two = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
agraph (float[2, 3, 32] x, float[2, 1, 32] last) => (float[2, 3, 32] y, float[2, 1, 32] z)
<int64[3] tokens = {2, 3, 32}, int64[3] answers = {2, 1, 32}, float half = {0.5}>
{
  flat = Flatten <axis = 2> (x)
  bent = com.microsoft.MatMulNBits <K = 32, N = 32> (flat, w)
  y = Reshape (bent, tokens)
  picked = Flatten <axis = 2> (last)
  answered = com.microsoft.MatMulNBits <K = 32, N = 32> (picked, w)
  z = Reshape (answered, answers)
}
"""
    assert kinds(in_whole_rows(parsed(two))) == {"MatMulNBits": 2}
    mixed = two.replace("z = Reshape (answered", "sum = Add (bent, answered)\n  z = Reshape (sum")
    assert in_whole_rows(parsed(mixed)) == parsed(mixed)


def test_a_graph_without_a_cache_stays_as_it_is() -> None:
    proto = parsed(ENGINE)
    del proto.graph.node[0]
    assert in_whole_rows(proto) is proto


# A plain product of either layout between a Flatten and a Reshape, as engines in float32 have them.
FLOATS = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
agraph (float[batch, tokens, 32] x) => (float[batch, tokens, 32] y)
<int64[1] last = {32}>
{
  flat = Flatten <axis = 2> (x)
  up = Gemm <transB = 1> (flat, turned)
  bent = Relu (up)
  down = Gemm (bent, turned)
  target = Shape (x)
  y = Reshape (down, target)
}
"""


def floats(text: str = FLOATS) -> onnx.ModelProto:
    proto = parsed(text)
    turned = RNG.standard_normal((16, 32)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(turned, "turned"))
    return proto


def test_products_of_floats_take_rows_and_tokens_as_they_are_whatever_their_layout() -> None:
    proto = floats()
    found = in_whole_rows(proto)
    assert kinds(found) == {"FusedMatMul": 1, "Relu": 1, "MatMul": 1}
    np.testing.assert_allclose(run(found), run(proto), rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [("Gemm (bent, turned)", "Gemm (bent, turned, bias)"), ("<transB = 1>", "<transB = 1, alpha = 2.0>")],
    ids=["a sum behind it", "a factor"],
)
def test_products_that_do_more_keep_the_graph_as_it_is(old: str, new: str) -> None:
    text = FLOATS.replace(old, new)
    assert text != FLOATS
    proto = floats(text)
    assert in_whole_rows(proto) is proto


def test_rows_and_tokens_that_change_places_before_a_product_keep_the_graph_as_it_is() -> None:
    """A Reshape behind it gives them other tokens, not their own back."""
    swapped = "  other = Transpose <perm = [PERM]> (x)\n  flat = Flatten <axis = 2> (other)"
    turned = FLOATS.replace("  flat = Flatten <axis = 2> (x)", swapped)
    for perm in ("1, 0, 2", "0, 2, 1"):  # of the second nothing is known
        proto = floats(turned.replace("PERM", perm))
        assert in_whole_rows(proto) is proto


def test_tokens_that_are_picked_by_their_numbers_come_back() -> None:
    text = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
agraph (float[batch, tokens, 32] x, int64[answers] at) => (float[batch, answers, 32] y)
<int64[1] width = {32}>
{
  picked = Gather <axis = 1> (x, at)
  flat = Flatten <axis = 2> (picked)
  bent = com.microsoft.MatMulNBits <K = 32, N = 32> (flat, w)
  rows = Shape <start = 0, end = 1> (x)
  answers = Shape (at)
  target = Concat <axis = 0> (rows, answers, width)
  y = Reshape (bent, target)
}
"""
    assert "Flatten" not in kinds(in_whole_rows(parsed(text)))
    for old, new in (("(rows, answers,", "(answers, rows,"), ("axis = 1> (x, at)", "axis = 0> (x, at)")):
        other = parsed(text.replace(old, new))
        assert in_whole_rows(other) == other


def test_a_target_made_of_a_whole_shape_is_known() -> None:
    """As behind a table of tokens in int4, whose rows are given their shape by that of the ids."""
    text = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
agraph (int64[batch, tokens] ids, float[2, 3, 32] x) => (float[2, 3, 32] y)
<int64[1] width = {32}>
{
  shape = Shape (ids)
  target = Concat <axis = 0> (shape, width)
  looked = Reshape (x, target)
  flat = Flatten <axis = 2> (looked)
  bent = com.microsoft.MatMulNBits <K = 32, N = 32> (flat, w)
  y = Reshape (bent, target)
}
"""
    assert kinds(in_whole_rows(parsed(text))) == {"Shape": 1, "Concat": 1, "Reshape": 1, "MatMulNBits": 1}


# Output of a joined product, taken apart.
PARTS = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
agraph (float[batch, tokens, 32] x) => (float[batch, tokens, 10] y, float[batch, tokens, 6] z)
<int64[2] widths = {10, 6}, int64[1] ten = {10}, int64[1] six = {6}>
{
  flat = Flatten <axis = 2> (x)
  both = Gemm <transB = 1> (flat, turned)
  one, other = Split <axis = -1> (both, widths)
  rows = Shape <start = 0, end = 2> (x)
  as_one = Concat <axis = 0> (rows, ten)
  y = Reshape (one, as_one)
  as_other = Concat <axis = 0> (rows, six)
  z = Reshape (other, as_other)
}
"""


def test_parts_of_a_product_keep_rows_and_tokens_too() -> None:
    proto = floats(PARTS)
    found = in_whole_rows(proto)
    assert kinds(found) == {"FusedMatMul": 1, "Split": 1}
    np.testing.assert_allclose(run(found), run(proto), rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int64[1] ten = {10}", "int64[1] ten = {6}"),
        ("<axis = -1> (both, widths)", "<axis = 0> (both, widths)"),
        ("(both, widths)", "(both)"),
    ],
    ids=["another width", "rows apart", "unknown widths"],
)
def test_parts_that_come_back_in_another_way_keep_the_graph_as_it_is(old: str, new: str) -> None:
    text = PARTS.replace(old, new)
    assert text != PARTS
    proto = floats(text)
    assert in_whole_rows(proto) is proto


# Rows of a table with their tokens, in heads and back, beside what nothing is known of.
GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
agraph (int64[batch, tokens] ids) => (float[batch, tokens, 8] y)
<int64[1] width = {8}, int64[2] heads = {2, 4}, int64[1] last = {-1}, float[5, 8] table = {0}, float[8] weight = {0}>
{
  whole = Shape (ids)
  front = Shape <start = 0, end = 1> (ids)
  apart = Concat <axis = 0> (whole, heads)
  back = Concat <axis = 0> (whole, width)
  behind = Unsqueeze (ids, last)
  looked = Gather (table, ids)
  scaled = Mul (looked, weight)
  split = Reshape (scaled, apart)
  turned = Transpose <perm = [0, 2, 1, 3]> (split)
  unknown = Expand (turned, front)
  added = Add (unknown, weight)
  y = Reshape (added, back)
}
"""


def test_targets_are_known_by_the_dimensions_of_the_inputs() -> None:
    targets = reshape_targets(onnx.parser.parse_model(GRAPH))
    assert targets["whole"] == ("batch", "tokens"), "without an end it is the whole shape"
    assert targets["front"] == ("batch",)
    assert (targets["apart"], targets["back"]) == (("batch", "tokens", 2, 4), ("batch", "tokens", 8))


def test_dimensions_are_counted_where_operators_say_them() -> None:
    proto = onnx.parser.parse_model(GRAPH)
    ranks = ranks_of(proto, reshape_targets(proto))
    found = {
        name: ranks.get(name) for name in ("behind", "looked", "scaled", "split", "turned", "unknown", "added", "y")
    }
    assert found == {
        "behind": 3,
        "looked": 3,
        "scaled": 3,
        "split": 4,
        "turned": 4,
        "unknown": None,
        "added": None,
        "y": 3,
    }


def test_rows_and_tokens_follow_the_ids_and_the_targets() -> None:
    proto = onnx.parser.parse_model(GRAPH)
    targets, rows = reshape_targets(proto), {"ids": ("batch", "tokens")}
    nodes = {node.output[0]: node for node in proto.graph.node}
    assert rows_of(nodes["looked"], rows, targets) == ("batch", "tokens")
    assert rows_of(nodes["y"], {}, targets) == ("batch", "tokens")
    assert rows_of(nodes["unknown"], rows, targets) is None
