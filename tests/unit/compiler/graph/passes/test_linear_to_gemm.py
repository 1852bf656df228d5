from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from nestforge.compiler.graph.passes.linear_to_gemm import linear_to_gemm
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
