"""Initializers that become inputs."""

from __future__ import annotations

import onnx
from nestforge.compiler.graph.weights_to_inputs import weights_to_inputs


def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) '
        "<float[2] w = {1, 2}, float[2] v = {3, 4}> { a = Add(x, w) y = Mul(a, v) }"
    )


def test_named_initializers_become_inputs_in_the_shapes_given() -> None:
    found = model()
    weights_to_inputs(found, {"w": (2,)})
    assert [tensor.name for tensor in found.graph.initializer] == ["v"]
    assert [value.name for value in found.graph.input] == ["x", "w"]
    assert [dim.dim_value for dim in found.graph.input[1].type.tensor_type.shape.dim] == [2]


def test_without_names_nothing_changes() -> None:
    found = model()
    weights_to_inputs(found, {})
    assert found == model()
