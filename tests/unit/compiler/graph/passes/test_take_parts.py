from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from nestforge.compiler.graph.passes.take_parts import take_parts
from onnx.reference import ReferenceEvaluator

# Two values joined and taken apart, as by `chunk` and by `unbind` behind a `view`.
SPLIT = """
<ir_version: 10, opset_import: ["" : 20]>
agraph (float[2, 3, 4] x) => (float[2, 3, 4] y)
{
  a = Neg (x)
  b = Abs (x)
  both = Concat <axis = -1> (a, b)
  c, d = Split <axis = 2, num_outputs = 2> (both)
  y = Sub (c, d)
}
"""
STEPS = """
<ir_version: 10, opset_import: ["" : 20]>
agraph (float[2, 3, 4] x) => (float[2, 3, 1, 2, 2] y)
<int64[5] target = {2, 3, 2, 2, 2}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] at = {-3}>
{
  a = Neg (x)
  b = Abs (x)
  both = Concat <axis = 2> (a, b)
  heads = Reshape (both, target)
  c = Slice (heads, zero, one, at)
  d = Slice (heads, one, two, at)
  y = Sub (c, d)
}
"""


def taken(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto, bool]:
    before = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    model = ir.from_proto(before)
    changed = take_parts(model)
    return before, ir.to_proto(model), changed


@pytest.mark.parametrize(
    ("text", "operators"),
    [(SPLIT, "Neg Abs Sub"), (STEPS, "Neg Abs Constant Reshape Constant Reshape Sub")],
    ids=["split", "steps"],
)
def test_what_was_joined_is_read_before(text: str, operators: str) -> None:
    before, after, changed = taken(text)
    assert changed
    assert Counter(node.op_type for node in after.graph.node) == Counter(operators.split())
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)}
    expected, found = (ReferenceEvaluator(proto).run(None, feeds)[0] for proto in (before, after))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (SPLIT, "axis = -1", "axis = 1"),
        (SPLIT, "axis = 2, num_outputs = 2", "axis = 1, num_outputs = 2"),
        (SPLIT, "c, d = Split <axis = 2, num_outputs = 2>", "c, d, e, f = Split <axis = 2, num_outputs = 4>"),
        (STEPS, "target = {2, 3, 2, 2, 2}", "target = {2, 3, 4, 2, 1}"),
        (STEPS, "axis = 2", "axis = 1"),
        (STEPS, "at = {-3}", "at = {-2}"),
    ],
)
def test_what_is_taken_across_parts_is_left(text: str, old: str, new: str) -> None:
    changed = text.replace(old, new)
    assert changed != text
    assert not take_parts(ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(changed))))
