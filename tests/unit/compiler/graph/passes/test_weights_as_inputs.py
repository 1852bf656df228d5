from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformers
from nestforge.bucket import Bucket
from nestforge.compiler.graph.make_template import traced_template
from nestforge.compiler.graph.passes.weights_as_inputs import weights_as_inputs
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from onnx_ir.passes.common import DeduplicateInitializersPass

TWO_EQUAL = """
<ir_version: 10, opset_import: ["" : 20]>
graph (float[3] x) => (float[3] y) <float[3] a = {0, 0, 0}, float[3] b = {0, 0, 0}, float[3] c = {0, 0, 0}>
{ s = Add (x, a)  t = Add (s, b)  y = Add (t, c) }
"""


def test_equal_weights_stay_apart_where_equal_constants_merge() -> None:
    model = ir.from_proto(onnx.parser.parse_model(TWO_EQUAL))
    with weights_as_inputs(model, {"a", "b"}):
        DeduplicateInitializersPass()(model)
        assert [value.name for value in model.graph.inputs] == ["x", "a", "b"]
    assert set(model.graph.initializers) == {"a", "b", "c"}
    assert [value.name for value in model.graph.inputs] == ["x"]
    np.testing.assert_array_equal(model.graph.initializers["a"].const_value.numpy(), np.zeros(3))


def test_a_weight_that_nothing_reads_is_dropped() -> None:
    model = ir.from_proto(onnx.parser.parse_model(TWO_EQUAL))
    with weights_as_inputs(model, {"a"}):
        reader = next(node for node in model.graph if node.inputs[1].name == "a")
        reader.replace_input_with(1, model.graph.initializers["c"])
    assert "a" not in model.graph.initializers


def test_weights_come_back_where_an_optimiser_fails() -> None:
    model = ir.from_proto(onnx.parser.parse_model(TWO_EQUAL))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(RuntimeError, match="no rule"), weights_as_inputs(model, {"a", "b", "c"}):
        raise RuntimeError("no rule")
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_fresh_model_full_of_equal_biases_slices(tmp_path: Path) -> None:
    """Zero biases and unit norms are equal by value, yet every one belongs to its own layer and axis."""
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "m")
    model = load_universal(open_source(tmp_path / "m"))
    template = traced_template(model, model.module, model.source.signature, Bucket(1, 16), opset=20)
    assert template.slice_problem is None
    assert len(template.weights) == len(model.parameters())
