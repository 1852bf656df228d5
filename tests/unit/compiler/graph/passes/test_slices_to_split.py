from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from nestforge.compiler.graph.passes.general_optimizer import optimize
from nestforge.compiler.graph.passes.slices_to_split import slices_to_split
from onnx.reference import ReferenceEvaluator
from onnxscript.optimizer import optimize_ir


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
    optimize(model, 64)
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
    optimize(ours, 64)
    optimize_ir(theirs, output_size_limit=64)
    assert sorted(operators(ours)) == sorted(operators(theirs)) == ["Concat", "Neg", "Split"]
