from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from nestforge.compiler.graph.precision.emulation import emulated
from nestforge.compiler.graph.precision.half import half
from onnx import TensorProto, numpy_helper
from support.half_engines import run

DTYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
RNG = np.random.default_rng(0)
# In steps and of a size that float32 sums exactly in any order, and that 16 bits do not hold.
X, W, V = (RNG.integers(-2048, 2048, shape).astype(np.float32) / 1024 for shape in ((3, 4), (4, 5), (5, 2)))


def _model(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (("w", W), ("v", V)))
    return model


@pytest.mark.parametrize("precision", DTYPES)
def test_what_16_bits_hold_is_rounded_and_what_stays_wide_is_not(precision: Any) -> None:
    def rounded(array: np.ndarray) -> np.ndarray:
        return array.astype(DTYPES[precision]).astype(np.float32)

    model = _model(
        """m (float[3, 4] x) => (float[3, 2] y, float[3, 5] p, float[5, 3] t)
        { h = Gemm (x, w)  n = Neg (h)  t = Transpose (n)  p = Softmax (h)  y = Gemm (n, v) }"""
    )
    engine = half(model, {}, precision, ()).proto
    found = run(emulated(engine.SerializeToString()), {"x": X})
    h = rounded(rounded(X) @ rounded(W))
    assert np.array_equal(found["t"], -h.T)
    assert np.array_equal(found["y"], rounded(-h @ rounded(V)))
    exponents = np.exp(h - h.max(-1, keepdims=True))
    np.testing.assert_allclose(found["p"], exponents / exponents.sum(-1, keepdims=True), rtol=1e-5)
    assert not np.array_equal(found["p"], rounded(found["p"]))
    assert not np.array_equal(found["y"], run(model.SerializeToString(), {"x": X})["y"])


def test_an_emulation_reads_the_engines_own_weights_and_computes_in_float32() -> None:
    engine = half(_model("m (float[3, 4] x) => (float[3, 5] y) { y = Gemm (x, w) }"), {}, "bf16", ()).proto
    before = engine.SerializeToString()
    graph = onnx.ModelProto.FromString(emulated(before))
    assert graph.graph.initializer == engine.graph.initializer
    kinds = {v.name: v.type.tensor_type.elem_type for v in onnx.shape_inference.infer_shapes(graph).graph.value_info}
    gemm = next(node for node in graph.graph.node if node.op_type == "Gemm")
    assert {kinds[name] for name in (*gemm.input, *gemm.output)} == {TensorProto.FLOAT}
    assert before == engine.SerializeToString()


def test_a_float32_engine_is_its_own_emulation() -> None:
    model = _model("m (float[3, 4] x) => (float[3, 2] y) { h = Gemm (x, w)  y = Gemm (h, v) }")
    assert onnx.ModelProto.FromString(emulated(model.SerializeToString())) == model


def test_a_mask_that_is_made_narrow_stays_a_mask() -> None:
    model = _model("m (bool[3, 4] keep) => (float[3, 5] y) { k = Cast <to=1> (keep)  n = Neg (k)  y = Gemm (n, w) }")
    engine = half(model, {}, "bf16", ()).proto
    keep = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
    expected = -(keep @ W.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.array_equal(run(emulated(engine.SerializeToString()), {"keep": keep})["y"], expected)
