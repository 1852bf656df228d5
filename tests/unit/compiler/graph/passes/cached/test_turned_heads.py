"""Turned queries, recognised in every way that models spell them out, and their heads behind tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nestforge.compiler.graph.passes.cached.turned_heads import heads_by_token, turned_heads
from onnx_ir.passes.common import RemoveUnusedNodesPass

_HEAD = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[batch, sequence, 2, 8] x, float[batch, sequence, R] cos, float[batch, sequence, R] sin)
    => (float[batch, sequence, 16] y)
<float[8] weight = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}, int64[1] axis = {AXIS}, int64[1] zero = {0},
 int64[1] two = {2}, int64[1] four = {4}, int64[1] end = {9223372036854775807}, int64[1] last = {3},
 int64[3] flat = {0, 0, 16}, float[batch, 2, sequence, 8] normed>
{
  c = Unsqueeze (cos, axis)
  s = Unsqueeze (sin, axis)
"""
_SWAPPED = "Transpose <perm = [0, 2, 1, 3]>"
_BACK = f"  b = {_SWAPPED} (a)\n  y = Reshape (b, flat)\n}}"
_HALVES = "  h1 = Slice (h, zero, four, last)\n  h2 = Slice (h, four, end, last)\n"
_ROTATED = "  n = Neg (h2)\n  r = Concat <axis = -1> (n, h1)\n"
_SUM = "  hc = Mul (h, c)\n  rs = Mul (r, s)\n  a = Add (hc, rs)\n"
_PLAIN = _HALVES + _ROTATED + _SUM + _BACK
_NORM = f"  q = {_SWAPPED} (x)\n  normed = SimplifiedLayerNormalization <axis = -1> (q, weight)\n"
_PART = f"""
  whole = {_SWAPPED} (x)
  h = Slice (whole, zero, four, last)
  rest = Slice (whole, four, end, last)
  h1 = Slice (h, zero, two, last)
  h2 = Slice (h, two, end, last)
{_ROTATED}  hc = Mul (h, c)
  rs = Mul (r, s)
  first = Add (hc, rs)
  a = Concat <axis = -1> (first, rest)
{_BACK}"""
_SPLIT = "  h1, h2 = Split <axis = 3, num_outputs = 2> (h)\n  r = Concat <axis = -1> (h2, h1)\n"
# By the model that has it: the text, the axis of heads, how many numbers are turned, and whether sines have the signs.
FORMS: dict[str, tuple[str, int, int, bool]] = {
    "Llama": (f"  h = {_SWAPPED} (x)\n{_PLAIN}", 1, 8, False),
    "Gemma 3": ((_NORM + _PLAIN).replace("(h,", "(normed,"), 1, 8, False),
    "Gemma 3n": (_PLAIN.replace("(h,", "(x,").replace(_BACK, "  y = Reshape (a, flat)\n}"), 2, 8, False),
    "Phi-3": (_PART, 1, 4, False),
    "MatLM": (f"  h = {_SWAPPED} (x)\n{_SPLIT}{_SUM}{_BACK}", 1, 8, True),
    "some other": (f"  q = {_SWAPPED} (x)\n  h = Abs (q)\n{_PLAIN}", 1, 8, False),
}
_AS_IT_IS: Callable[[np.ndarray], np.ndarray] = np.asarray
_MADE: dict[str, tuple[Callable[[np.ndarray], np.ndarray], dict[str, int]]] = {
    "Gemma 3": (
        lambda x: x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * np.arange(1, 9),
        {"SimplifiedLayerNormalization": 1},
    ),
    "some other": (np.abs, {"Transpose": 2, "Abs": 1}),
}


def model(form: str, old: str = "", new: str = "") -> ir.Model:
    """The graph of ``form``, read by what stands for attention."""
    text, axis, turned, _ = FORMS[form]
    assert old in text
    text = _HEAD.replace("AXIS", str(axis)).replace("R]", f"{turned}]") + text.replace(old, new)
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def reader(own: ir.Model) -> ir.Node:
    return ir.node("GroupQueryAttention", [own.graph.outputs[0]], domain="com.microsoft")


@pytest.mark.parametrize("form", FORMS)
def test_heads_are_found_and_stand_behind_their_tokens(form: str) -> None:
    own = model(form)
    found = turned_heads(reader(own), 0)
    assert found is not None
    _, axis, turned, is_signed = FORMS[form]
    assert found.dims == ("batch", "sequence", 2, 8)
    assert (found.in_front, found.turned, found.is_signed) == (axis == 1, turned, is_signed)
    assert [value.name for value in (found.cos, found.sin)] == ["c", "s"]
    found.flat.replace_input_with(0, heads_by_token(found))
    RemoveUnusedNodesPass()(own)
    made, kinds = _MADE.get(form, (_AS_IT_IS, {}))
    assert Counter(node.op_type for node in own.graph) == {**kinds, "Reshape": 1}
    x = np.random.default_rng(0).standard_normal((2, 3, 2, 8)).astype(np.float32)
    session = onnxruntime.InferenceSession(ir.to_proto(own).SerializeToString())
    given = {value.name: x if value.name == "x" else np.zeros((2, 3, turned), np.float32) for value in own.graph.inputs}
    np.testing.assert_allclose(session.run(None, given)[0], made(x).reshape(2, 3, 16), atol=1e-6)


@pytest.mark.parametrize(
    ("form", "old", "new"),
    [
        ("Llama", "(n, h1)", "(h1, n)"),
        ("Llama", "(h, four, end", "(h, zero, four"),
        ("Llama", "Mul (r, s)", "Mul (h, s)"),
        ("Llama", "Neg (h2)", "Abs (h2)"),
        ("Llama", "Slice (h, zero, four", "Slice (h, zero, two"),
        ("Llama", "perm = [0, 2, 1, 3]> (a)", "perm = [0, 1, 2, 3]> (a)"),
        ("MatLM", "(h2, h1)", "(h1, h2)"),
        ("Phi-3", "(first, rest)", "(rest, first)"),
        ("Phi-3", "Slice (whole, four, end", "Slice (whole, zero, four"),
        ("Gemma 3n", "Neg (h2)", "Neg (h1)"),
    ],
)
def test_what_is_turned_in_another_way_is_not_taken_for_it(form: str, old: str, new: str) -> None:
    assert turned_heads(reader(model(form)), 0) is not None
    assert turned_heads(reader(model(form, old, new)), 0) is None


def test_angles_that_differ_by_head_or_row_are_not_those_of_tokens() -> None:
    text = FORMS["Llama"][0]
    for own in ("float[batch, 2, sequence, 8] c", "float[1, 1, sequence, 8] c", "float[batch, 1, 1, 8] c"):
        head = _HEAD.replace("  c = Unsqueeze (cos, axis)\n", "").replace("AXIS", "1").replace("R]", "8]")
        head = head.replace("(float[batch, sequence, 2, 8] x", f"(float[batch, sequence, 2, 8] x, {own}")
        proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(head + text))
        assert turned_heads(reader(ir.from_proto(proto)), 0) is None
