"""Clips of whole numbers, in operators that TensorRT's parser has for them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from nestforge.compiler.tensorrt.graphs import in_parsed_operators
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

    def answer(model: onnx.ModelProto) -> np.ndarray:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        found: np.ndarray = session.run(None, numbers)[0]
        return found

    assert any("Clip" in problem for problem in unsupported(model))
    made = in_parsed_operators(model)
    onnx.checker.check_model(made)
    assert unsupported(made) == []
    np.testing.assert_array_equal(answer(made), answer(model))
    assert in_parsed_operators(made) is made


def test_others_stay() -> None:
    for model in (clipping(TensorProto.FLOAT, ["low", "high"]), clipping(TensorProto.INT64, [])):
        assert in_parsed_operators(model) is model
