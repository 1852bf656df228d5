import numpy as np
import onnx
import onnx_ir as ir
import pytest
from nestforge.compiler.graph.encodings import stored_stack
from nestforge.compiler.graph.passes.linear_to_gemm import linear_to_gemm, rows_as_weights
from nestforge.compiler.graph.store import StoredTensor
from nestforge.elastic import ElasticSpec
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

LINEAR = """
<ir_version: 10, opset_import: ["" : 20]>
linear (float[2, 3, 4] x) => (float[2, 3, 5] y)
{
  t = Transpose <perm=[1, 0]> (w)
  m = MatMul (x, t)
  y = Add (m, b)
}
"""
W = np.arange(20, dtype=np.float32).reshape(5, 4) / 7
B = np.linspace(-1, 1, 5, dtype=np.float32)


def _model(text: str = LINEAR, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    for name, value in (weights or {"w": W, "b": B}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return onnx.shape_inference.infer_shapes(model)


def _run(model: onnx.ModelProto, **feeds: np.ndarray) -> np.ndarray:
    return ReferenceEvaluator(model).run(None, feeds)[0]


@pytest.mark.parametrize("transposed", [(), ("w",)])
def test_a_linear_layer_becomes_a_gemm_that_computes_the_same(transposed: tuple[str, ...]) -> None:
    proto, x = _model(), np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    model = ir.from_proto(proto)
    assert linear_to_gemm(model, transposed)
    RemoveUnusedNodesPass()(model)
    kinds = [node.op_type for node in model.graph if node.op_type != "Constant"]
    assert kinds == ["Reshape", "Gemm", "Reshape"]
    gemm = next(node for node in model.graph if node.op_type == "Gemm")
    assert (gemm.inputs[1].name, gemm.attributes.get_int("transB")) == (("w.T", 0) if transposed else ("w", 1))
    np.testing.assert_allclose(_run(ir.to_proto(model), x=x), _run(proto, x=x), rtol=1e-6, atol=1e-6)


def test_a_gemm_of_rank_two_only_changes_its_layout() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    pooler (float[2, 4] x) => (float[2, 5] y) { y = Gemm <transB=1> (x, w, b) }
    """
    proto, x = _model(text, w=W, b=B), np.ones((2, 4), np.float32)
    model = ir.from_proto(proto)
    linear_to_gemm(model, {"w"})
    assert "w.T" in model.graph.initializers
    np.testing.assert_allclose(_run(ir.to_proto(model), x=x), _run(proto, x=x), rtol=1e-6)


def test_a_table_that_is_stored_transposed_is_read_through_a_transpose() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    table (int64[2, 3] x) => (float[2, 3, 4] y) { y = Gather <axis=0> (w, x) }
    """
    proto, x = _model(text, w=W), np.array([[0, 4, 1], [2, 2, 3]])
    model = ir.from_proto(proto)
    assert linear_to_gemm(model, {"w"})
    RemoveUnusedNodesPass()(model)
    assert [*model.graph.initializers] == ["w.T"]
    np.testing.assert_array_equal(_run(ir.to_proto(model), x=x), _run(proto, x=x))


def test_a_product_of_activations_is_left_alone() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    scores (float[2, 3, 4] x) => (float[2, 3, 3] y) { t = Transpose <perm=[0, 2, 1]> (x)  y = MatMul (x, t) }
    """
    assert not linear_to_gemm(ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))), ())


def test_a_sum_with_another_activation_is_no_bias() -> None:
    text = LINEAR.replace("Add (m, b)", "Add (m, m)")
    model = ir.from_proto(_model(text, w=W))
    linear_to_gemm(model, ())
    assert [node.op_type for node in model.graph].count("Add") == 1


STACKED = """
<ir_version: 10, opset_import: ["" : 20]>
graph (float[2, 2] x, int64 which) => (float[2, 3] y, float[2, 3] z, float[2, 3] given)
<float[2, 2, 3] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, int64 second = {1}, int64 last = {-1}, int64[1] few = {1}>
{
    one = Gather (w, second)
    again = Gather (w, last)
    listed = Gather (w, few)
    first = Gather (listed, which)
    y = MatMul (x, one)
    s = MatMul (x, again)
    z = Add (s, first)
    given = Gather (w, which)
}
"""


def test_a_row_taken_by_a_constant_is_a_weight() -> None:
    model = ir.from_proto(onnx.parser.parse_model(STACKED))
    assert rows_as_weights(model, {"w"})
    row = model.graph.initializers["w[1]"]
    np.testing.assert_array_equal(row.const_value.numpy(), [[6, 7, 8], [9, 10, 11]])
    assert [str(extent) for extent in row.shape] == ["2", "3"]
    assert [use.node.op_type for use in row.uses()] == ["MatMul", "MatMul"]
    # A list of rows, and a row that an input names, are not.
    left = [node.inputs[1].name for node in model.graph if node.op_type == "Gather" and node.outputs[0].uses()]
    assert left == ["few", "which"]


def test_other_tables_are_left_alone() -> None:
    model = ir.from_proto(onnx.parser.parse_model(STACKED))
    assert not rows_as_weights(model, {"v"})
    assert "w[1]" not in model.graph.initializers


@pytest.mark.parametrize(
    ("name", "parts"),
    [("a.b[12]", ("a.b", 12)), ("a.b", ("a.b", None)), ("a[x]", ("a[x]", None)), ("a.b.T", ("a.b.T", None))],
)
def test_names_of_rows(name: str, parts: tuple[str, int | None]) -> None:
    assert stored_stack(name) == parts


def test_a_row_of_the_store_is_a_view() -> None:
    stack = StoredTensor(offset=400, shape=(4, 2, 3), itemsize=4, cut=None, file="w")
    assert stack.row(3) == StoredTensor(offset=400 + 3 * 24, shape=(2, 3), itemsize=4, cut=None, file="w")
    assert stack.row(3).length(ElasticSpec((), ()).universal()) == 24
