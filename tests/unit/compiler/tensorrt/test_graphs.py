"""Clips of whole numbers, in operators that TensorRT's parser has for them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from nestforge.compiler.tensorrt.graphs import whole_clips
from nestforge.compiler.tensorrt.operators import unsupported
from onnx import TensorProto, helper


def clipping(kind: int, bounds: list[str]) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, kind, ["count"]) for name in ("x", "y")]
    constants = [helper.make_tensor(name, kind, [], [number]) for name, number in (("low", -2), ("high", 3))]
    nodes = [helper.make_node("Clip", ["x", *bounds], ["kept"], "clip"), helper.make_node("Neg", ["kept"], ["y"])]
    graph = helper.make_graph(nodes, "clipping", values[:1], values[1:], constants)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


@pytest.mark.parametrize("bounds", [["low"], ["low", "high"], ["", "high"]])
def test_whole_numbers_are_bounded_as_before(bounds: list[str]) -> None:
    model = clipping(TensorProto.INT64, bounds)
    numbers = {"x": np.arange(-5, 7)}

    def answer() -> np.ndarray:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        found: np.ndarray = session.run(None, numbers)[0]
        return found

    expected = answer()
    assert any("Clip" in problem for problem in unsupported(model))
    assert whole_clips(model) == 1
    onnx.checker.check_model(model)
    assert unsupported(model) == []
    np.testing.assert_array_equal(answer(), expected)
    assert whole_clips(model) == 0


def test_others_stay() -> None:
    model = clipping(TensorProto.FLOAT, ["low", "high"])
    before = model.SerializeToString(deterministic=True)
    assert whole_clips(model) == 0
    assert whole_clips(clipping(TensorProto.INT64, [])) == 0
    assert model.SerializeToString(deterministic=True) == before
