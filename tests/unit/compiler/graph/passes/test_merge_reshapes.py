from collections import Counter

import onnx
import onnx_ir as ir
import pytest
from nestforge.compiler.graph.passes.merge_reshapes import flatten_rows, merge_reshapes
from onnx_ir.passes.common import RemoveUnusedNodesPass
from support.graphs import graph_of, passed, require_same


def _merged(text: str) -> list[str]:
    before, after, changed = passed(merge_reshapes, text)
    assert changed
    require_same(before, after)
    return [node.op_type for node in after.graph.node]


def test_two_reshapes_are_one() -> None:
    left = _merged("""
    <ir_version: 10, opset_import: ["" : 20]>
    graph (float[6, 8] x) => (float[2, 3, 4, 2] y) <int64[3] a = {2, 3, 8}, int64[4] b = {2, 3, -1, 2}>
    { r = Reshape (x, a)  y = Reshape (r, b) }
    """)
    assert left == ["Reshape"]


@pytest.mark.parametrize(("operator", "axis"), [("Unsqueeze", 2), ("Squeeze", 0)])
def test_a_dimension_of_one_in_front_of_a_reshape_is_none(operator: str, axis: int) -> None:
    left = _merged(f"""
    <ir_version: 10, opset_import: ["" : 20]>
    graph (float[6, 8] x) => (float[2, 3, 4, 2] y)
    <int64[3] a = {{1, 6, 8}}, int64[1] axis = {{{axis}}}, int64[4] b = {{2, 3, -1, 2}}>
    {{ r = Reshape (x, a)  u = {operator} (r, axis)  y = Reshape (u, b) }}
    """)
    assert left == ["Reshape"]


def test_the_way_there_and_back_around_an_activation_disappears() -> None:
    left = _merged("""
    <ir_version: 10, opset_import: ["" : 20]>
    graph (float[6, 8] x) => (float[6, 8] y) <int64[3] a = {2, 3, -1}, int64[2] b = {6, -1}>
    { n = Neg (x)  r = Reshape (n, a)  g = Tanh (r)  s = Reshape (g, b)  y = Neg (s) }
    """)
    assert left == ["Neg", "Tanh", "Neg"]


def test_an_activation_of_several_operations_disappears_too() -> None:
    """Squared ReLU: two nodes, the second with a number."""
    left = _merged("""
    <ir_version: 10, opset_import: ["" : 20]>
    graph (float[6, 8] x) => (float[6, 8] y) <int64[3] a = {2, 3, -1}, int64[2] b = {6, -1}, float two = {2.0}>
    { n = Neg (x)  r = Reshape (n, a)  g = Relu (r)  q = Pow (g, two)  s = Reshape (q, b)  y = Neg (s) }
    """)
    assert left == ["Neg", "Relu", "Pow", "Neg"]


@pytest.mark.parametrize(
    "rest",
    [
        "g = Relu (r)  q = Pow (g, powers)  y = Reshape (q, b)",  # a vector belongs to the shape
        "g = Relu (r)  q = Pow (two, g)  y = Reshape (q, b)",  # the number comes first
        "g = Relu (r)  q = Pow (g, two)  w = Mul (q, r)  y = Reshape (w, b)",  # one branch of two
    ],
)
def test_elementwise_work_on_more_than_one_tensor_stays_in_shape(rest: str) -> None:
    model = graph_of(f"""
    <ir_version: 10, opset_import: ["" : 20]>
    graph (float[6, 8] x) => (float[6, 8] y)
    <int64[3] a = {{2, 3, -1}}, int64[2] b = {{6, -1}}, float two = {{2.0}}, float[3, 1] powers = {{1.0, 2.0, 3.0}}>
    {{ r = Reshape (x, a)  {rest} }}
    """)
    assert not merge_reshapes(model)


def test_an_activation_that_others_read_in_shape_stays_in_shape() -> None:
    model = graph_of("""
    <ir_version: 10, opset_import: ["" : 20]>
    graph (float[6, 8] x) => (float[2, 3, 8] y) <int64[3] a = {2, 3, -1}>
    { r = Reshape (x, a)  g = Tanh (r)  y = Softmax <axis=1> (g) }
    """)
    assert not merge_reshapes(model)


# Between two products: a bias, a residual sum with what has no rows yet, a norm, and the sum given on.
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


def test_what_lies_between_products_stays_in_rows() -> None:
    before, after, kinds = flattened(BETWEEN)
    # One Flatten of what had no rows, one Reshape for what is an output.
    work = {"Relu": 1, "Add": 2, "SimplifiedLayerNormalization": 1, "Abs": 1, "Sqrt": 1}
    assert kinds == {**work, "Flatten": 1, "Reshape": 1}
    require_same(before, after, least=0)


def test_what_broadcasts_over_tokens_stays_as_it_is() -> None:
    text = BETWEEN.replace("float[4] w)", "float[4] w, float[2, 1, 4] u)").replace("Add (x, w)", "Add (x, u)")
    before, after, kinds = flattened(text)
    assert kinds["Flatten"] == kinds["Reshape"] == 1
    assert [node.op_type for node in after.graph.node][1] == "Reshape"
    require_same(before, after, least=0)
