"""onnxscript's optimiser with rules at their own operators, weights out of its reach, and short names."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import transformers
from nestforge.bucket import Bucket
from nestforge.compiler.graph.make_template import traced_template
from nestforge.compiler.graph.passes import general_optimizer
from nestforge.compiler.graph.passes.general_optimizer import (
    optimize,
    shorten_names,
    slices_to_split,
    weights_as_inputs,
)
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import DeduplicateInitializersPass
from onnxscript import rewriter
from onnxscript.optimizer import optimize_ir
from support.cost_eff_models import save_tiny
from support.gated_decoders import save_decoder
from support.tiny_compile import save_tiniest, template_of


@pytest.mark.parametrize("save", [save_tiniest, save_decoder, save_tiny])
def test_the_graph_is_that_of_onnxscripts_own_rules_tried_at_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: object
) -> None:
    universal = load_universal(open_source(save(tmp_path / "m")))
    found = template_of(universal)
    monkeypatch.setattr(
        general_optimizer, "_REWRITE", lambda model: ir.passes.PassResult(rewriter.rewrite(model), True)
    )
    expected = template_of(universal)
    assert (found.proto, found.module_outputs) == (expected.proto, expected.module_outputs)


@pytest.mark.parametrize(("operator", "neutral"), [("Add", 0.0), ("Sub", 0.0), ("Mul", 1.0), ("Div", 1.0)])
def test_what_changes_nothing_goes_and_an_epsilon_stays(operator: str, neutral: float) -> None:
    """An epsilon of 1e-8 is added to squares that may be as small, as in the norms of Muse Glimmer."""
    for constant, left in ((neutral, ["Sqrt"]), (neutral + 2**-23 if neutral else 1e-8, [operator, "Sqrt"])):
        model = ir.from_proto(
            onnx.parser.parse_model(
                f"""<ir_version: 10, opset_import: ["" : 20]>
                agraph (float[2, 3] x) => (float[2, 3] y)
                <float c = {{{constant:.9g}}}>
                {{
                    a = {operator} (x, c)
                    y = Sqrt (a)
                }}"""
            )
        )
        optimize(model)
        assert [node.op_type for node in model.graph] == left


def test_a_rule_rewrites_at_its_operator() -> None:
    graph = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        agraph (float[2, 3] x) => (float[2, 3] y)
        {
            a = Transpose <perm = [1, 0]> (x)
            b = Transpose <perm = [1, 0]> (a)
            y = Relu (b)
        }"""
    )
    model = ir.from_proto(graph)
    assert optimize(model)
    assert [node.op_type for node in model.graph] == ["Relu"]


def turned(extent: int, first: tuple[int, int], second: tuple[int, int], axis: int = -1) -> onnx.ModelProto:
    """``[-second, first]`` of the last dimension, as rotary positions turn a head; the second part is taken first."""
    text = f"""
<ir_version: 10, opset_import: ["" : 20]>
turn (float[2, {extent}] x) => (float[2, N] y)
<int64[1] b = {{{second[0]}}}, int64[1] e = {{{second[1]}}}, int64[1] c = {{{first[0]}}}, int64[1] f = {{{first[1]}}},
 int64[1] axis = {{{axis}}}>
{{
  right = Slice (x, b, e, axis)
  minus = Neg (right)
  left = Slice (x, c, f, axis)
  y = Concat <axis=1> (minus, left)
}}
"""
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize(("end", "axis"), [(8, -1), (8, 1), (2**62, -1)])
def test_two_halves_are_one_split(end: int, axis: int) -> None:
    before = turned(8, (0, 4), (4, end), axis)
    model = ir.from_proto(before)
    assert slices_to_split(model)
    optimize(model)
    assert operators(model) == ["Split", "Neg", "Concat"]
    x = {"x": np.arange(16, dtype=np.float32).reshape(2, 8)}
    (expected,), (found,) = ReferenceEvaluator(before).run(None, x), ReferenceEvaluator(ir.to_proto(model)).run(None, x)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("extent", "first", "second"),
    [(8, (0, 3), (3, 8)), (8, (0, 4), (5, 8)), (8, (1, 4), (4, 8)), (7, (0, 3), (3, 7)), (8, (0, 4), (0, 4))],
    ids=["not halves", "a gap", "not from the start", "odd", "the same half twice"],
)
def test_other_parts_stay(extent: int, first: tuple[int, int], second: tuple[int, int]) -> None:
    model = ir.from_proto(turned(extent, first, second))
    assert not slices_to_split(model)


def test_the_optimiser_makes_what_onnxscripts_makes() -> None:
    ours, theirs = (ir.from_proto(turned(8, (0, 4), (4, 8))) for _ in range(2))
    optimize(ours)
    optimize_ir(theirs, output_size_limit=64)
    assert sorted(operators(ours)) == sorted(operators(theirs)) == ["Concat", "Neg", "Split"]


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
