from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from nestforge.compiler.graph.passes.shorten_names import shorten_names

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[2] v0) => (float[2] y)
<float[2] layer_weight = {3, 5}, float[2] v1 = {1, 1}>
{
  layer_output = Mul (v0, layer_weight)
  v2 = Add (layer_output, v1)
  y = Sub (v2, layer_output)
}
"""


def _model() -> ir.Model:
    model = ir.from_proto(onnx.parser.parse_model(MODEL))
    for node in model.graph:
        node.name = f"node_{node.op_type}"
    return model


def test_interface_and_weights_keep_their_names_and_the_rest_is_short() -> None:
    model = _model()
    assert shorten_names(model, {"layer_weight"})
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == ["v0", "y"]
    assert set(model.graph.initializers) == {"layer_weight", "v1"}
    made = [value.name for node in model.graph for value in node.outputs]
    assert made == ["v2", "v3", "y"], "v0 and v1 are taken"
    assert [node.name for node in model.graph] == [None] * 3


def test_the_function_is_the_same() -> None:
    model = _model()
    shorten_names(model, set())
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["y"], {"v0": np.array([1, 2], np.float32)})
    assert found.tolist() == [1, 1]


def test_the_same_graph_gets_the_same_names() -> None:
    models = [_model(), _model()]
    for model in models:
        shorten_names(model, {"layer_weight"})
    assert ir.to_proto(models[0]).SerializeToString() == ir.to_proto(models[1]).SerializeToString()
