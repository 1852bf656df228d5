"""Rotary positions: recognised in every way that models spell them out, and fused into an operator or attention."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nestforge.compiler.graph.passes import rotary_tables
from nestforge.compiler.graph.passes.fuse_rotary import (
    fuse_rotary,
    fuse_rotary_into_attention,
    heads_by_token,
    turned_heads,
)
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


_ANGLES = """
  at = Unsqueeze ({positions}, two)
  number = Cast <to = 1> (at)
  half = Mul (number, rates)
{more}  angles = Concat <axis = -1> (half, half)
  cosine = Cos (angles)
  c = Mul (cosine, scale)
  sine = Sin (angles)
  s = Mul (sine, scale)
  cu = Unsqueeze (c, one)
  su = Unsqueeze (s, one)
"""
_TURN = """
  {x}t = Transpose <perm = [0, 2, 1, 3]> ({x})
  {x}1 = Slice ({x}t, zero, middle, three{step})
  {x}2 = Slice ({x}t, middle, end, three{step})
  {x}n = Neg ({x}2)
  {x}r = Concat <axis = -1> ({x}n, {x}1)
  {x}c = Mul ({x}t, cu)
  {x}s = Mul ({x}r, su)
  {x}a = Add ({x}c, {x}s)
  {x}b = Transpose <perm = [0, 2, 1, 3]> ({x}a)
  {x}f = Reshape ({x}b, {flat})
"""


# Two rows with three new tokens, two heads of 8; values are the keys before they are turned. The operator over the
# cache is replaced by what shows its inputs.
ROTARY = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
agraph (int64[2, 3] ids, int64[2, 3] positions, float[2, 3, 2, 8] q, float[2, 3, 2, 8] k) => (float[2, 3, 16] y)
<float[4] rates = {1.0, 0.5, 0.25, 0.1}, float[4] others = {1.0, 0.4, 0.2, 0.1}, float scale = {1.2},
 int64[1] two = {2}, int64[1] one = {1}, int64[1] three = {3}, int64[3] flat = {2, 3, 16},
 int64[1] zero = {0}, int64[1] middle = {4}, int64[1] end = {9223372036854775807}, int64[1] step = {1}>
{
"""
ROTARY += _ANGLES.format(positions="positions", more="  other = Mul (number, others)\n")
ROTARY += _TURN.format(x="q", step=", step", flat="flat") + _TURN.format(x="k", step="", flat="flat")
ROTARY += """
  y = com.microsoft.GroupQueryAttention (qf, kf)
}
"""


def fused(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto, Counter[str]]:
    before = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    model = ir.from_proto(before)
    fuse_rotary(model)
    RemoveUnusedNodesPass()(model)
    return before, ir.to_proto(model), Counter(node.op_type for node in model.graph)


def run(model: onnx.ModelProto, positions: int = 2) -> np.ndarray:
    """Queries minus keys, at the positions of so many rows."""
    model.graph.node[-1].op_type, model.graph.node[-1].domain = "Sub", ""
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 3, 2, 8)).astype(np.float32) for name in ("q", "k")}
    feeds |= {"ids": np.zeros((2, 3), np.int64), "positions": np.array([[0, 1, 2], [4, 7, 5]])[:positions]}
    left = {value.name for value in model.graph.input}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {name: array for name, array in feeds.items() if name in left})[0]


def test_queries_and_keys_are_turned_by_one_node_each() -> None:
    before, after, kinds = fused(ROTARY)
    assert kinds["RotaryEmbedding"] == 2
    assert not kinds.keys() & {"Neg", "Transpose", "Add"}
    assert (kinds["Cos"], kinds["Sin"], kinds["Slice"], kinds["Flatten"], kinds["Range"]) == (1, 1, 2, 2, 1)
    np.testing.assert_allclose(run(after), run(before), atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Concat <axis = -1> (half, half)", "Concat <axis = -1> (half, other)"),
        ("Mul (number, rates)\n", "Mul (number, rates)\n  wide = Concat <axis = -1> (half, half)\n"),
        ("(qn, q1)", "(q1, qn)"),
        ("Slice (qt, middle, end", "Slice (qt, zero, middle"),
        ("Mul (qr, su)", "Mul (qr, cu)"),
    ],
)
def test_what_is_turned_in_another_way_keeps_its_function(old: str, new: str) -> None:
    text = ROTARY.replace(old, new)
    if "wide" in new:  # both halves alike, but not the angles of one position
        text = text.replace("Cos (angles)", "Abs (wide)")
    before, after, kinds = fused(text)
    assert kinds["RotaryEmbedding"] < 2 or old == "Mul (qr, su)"
    np.testing.assert_allclose(run(after), run(before), atol=1e-6)


def test_angles_that_all_rows_have_in_common_are_left() -> None:
    """The operator would read those of the second row behind the end."""
    text = ROTARY.replace("int64[2, 3] positions", "int64[1, 3] positions")
    before, after, kinds = fused(text)
    assert not kinds["RotaryEmbedding"]
    np.testing.assert_allclose(run(after, positions=1), run(before, positions=1), atol=1e-6)


def test_tokens_that_are_not_those_of_the_first_input_are_left() -> None:
    before, after, kinds = fused(ROTARY.replace("int64[2, 3] ids", "int64[6, 1] ids"))
    assert not kinds["RotaryEmbedding"]
    assert after.graph.node[-1].input == before.graph.node[-1].input


# Two query heads of 32 numbers that share one of keys and values; a cache of 80 places, which the caller says.
POSITIONS = 80
TURNED = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
step (int64[batch, sequence] input_ids, int64[batch, sequence] position_ids, float[batch, sequence, 2, 32] q,
      float[batch, sequence, 1, 32] k, float[batch, sequence, 32] v, float[batch, 1, capacity, 32] past_key,
      float[batch, 1, capacity, 32] past_value, int32[batch] last, int32 total, float[batch, 2, sequence, text] bias)
    => (float[batch, sequence, 64] y, float[batch, 1, capacity, 32] key, float[batch, 1, capacity, 32] value)
<float[1] weight = {1.0}, float scale = {1.2}, int64[1] two = {2}, int64[1] one = {1}, int64[1] three = {3},
 int64[1] zero = {0}, int64[1] middle = {16}, int64[1] end = {9223372036854775807}, int64[3] wide = {0, 0, 64},
 int64[3] narrow = {0, 0, 32}>
{
"""
TURNED += _ANGLES.format(positions="position_ids", more="")
TURNED += _TURN.format(x="q", step="", flat="wide") + _TURN.format(x="k", step="", flat="narrow")
TURNED += """
  y, key, value = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1, local_window_size = -1>
    (qf, kf, v, past_key, past_value, last, total)
}
"""
OF_A_WINDOW = TURNED.replace("local_window_size = -1", "local_window_size = 6")
# Attention that reads what an earlier layer has written: no new keys, which it gets as none of the query's tokens.
READING = TURNED.replace("(qf, kf, v, past", "(qf, none, none, past").replace(
    "  y, key,", "  some = Slice (qf, zero, zero, one)\n  none = Slice (some, zero, width, two)\n  y, key,"
)
READING = READING.replace("float scale", "float[batch, 0, 64] some, float[batch, 0, 32] none, float scale")


def turned(text: str, count: int = POSITIONS) -> tuple[onnx.ModelProto, onnx.ModelProto, Counter[str]]:
    proto = onnx.parser.parse_model(text)
    rates = (1e4 ** -(np.arange(16) / 16)).astype(np.float32)
    for name, array in {"rates": rates, "width": np.array([32], np.int64)}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    before = onnx.shape_inference.infer_shapes(proto)
    model = ir.from_proto(before)
    fuse_rotary_into_attention(model, count, {"weight"})
    RemoveUnusedNodesPass()(model)
    return before, ir.to_proto(model), Counter(node.op_type for node in model.graph)


def is_turned(proto: onnx.ModelProto) -> bool:
    attributes = (attribute for node in proto.graph.node for attribute in node.attribute)
    return any(attribute.name == "do_rotary" and attribute.i for attribute in attributes)


def stepped(proto: onnx.ModelProto, last: list[int], tokens: int = 1, slid: int = 0) -> list[np.ndarray]:
    """Rows whose last new token is at the place ``last`` of their buffers, which begin ``slid`` tokens behind the text,
    in each row one more."""
    rng, rows, capacity = np.random.default_rng(0), len(last), POSITIONS
    shapes = {"q": (tokens, 2, 32), "k": (tokens, 1, 32), "v": (tokens, 32)}
    shapes |= dict.fromkeys(("past_key", "past_value"), (1, capacity, 32)) | {"bias": (2, tokens, max(last) + 1)}
    feeds = {name: rng.standard_normal((rows, *shape)).astype(np.float32) for name, shape in shapes.items()}
    text = np.array([[at + 1 - tokens + n + slid * (row + 1) for n in range(tokens)] for row, at in enumerate(last)])
    feeds |= {"position_ids": text, "input_ids": np.zeros_like(text), "last": np.array(last, np.int32)}
    feeds |= {"total": np.array(max(last) + 1, np.int32)}
    left = {value.name for value in proto.graph.input}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    return session.run(None, {name: array for name, array in feeds.items() if name in left})


# Chunks of a text, from its beginning and behind others, drafted tokens that are checked, and rows that step together.
@pytest.mark.parametrize(
    ("last", "tokens"),
    [([4], 5), ([16], 17), ([63], 64), ([POSITIONS - 1], 64), ([40], 5), ([41], 1), ([*range(3, 35)], 1), ([0, 0], 1)],
)
def test_numbers_are_those_of_the_nodes(last: list[int], tokens: int) -> None:
    before, after, kinds = turned(TURNED)
    assert kinds == {"Reshape": 2, "GroupQueryAttention": 1}
    for own, expected in zip(stepped(after, last, tokens), stepped(before, last, tokens), strict=True):
        np.testing.assert_allclose(own, expected, atol=2e-6)


@pytest.mark.parametrize(("last", "tokens"), [([9], 5), ([4], 5), ([8, 3, 20], 1), ([3, 3, 3], 1)])
def test_places_in_a_window_are_not_positions(last: list[int], tokens: int) -> None:
    before, after, _ = turned(OF_A_WINDOW)
    assert is_turned(after)
    for own, expected in zip(
        stepped(after, last, tokens, slid=13), stepped(before, last, tokens, slid=13), strict=True
    ):
        np.testing.assert_allclose(own, expected, atol=2e-6)


def test_the_last_position_is_the_tables_last_row_and_none_is_read_behind_it() -> None:
    before, after, _ = turned(TURNED, count=60)
    assert [list(tensor.dims) for tensor in after.graph.initializer if len(tensor.dims) == 2] == [[60, 16]] * 2
    np.testing.assert_allclose(stepped(after, [59], 3)[0], stepped(before, [59], 3)[0], atol=2e-6)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match="less than total_seq"):
        stepped(after, [60], 3)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match=r"out of range \[0, 60\)"):
        stepped(after, [4], 3, slid=56)


def test_queries_of_keys_that_are_there_already_are_turned_alone() -> None:
    before, after, kinds = turned(READING)
    assert is_turned(after)
    assert kinds == {"Reshape": 1, "Slice": 2, "GroupQueryAttention": 1}
    for last, tokens in (([9], 1), ([9], 4), ([7, 3], 1)):
        for own, expected in zip(stepped(after, last, tokens), stepped(before, last, tokens), strict=True):
            np.testing.assert_allclose(own, expected, atol=2e-6)


def test_a_bias_keeps_its_place() -> None:
    before, after, _ = turned(TURNED.replace("last, total)\n}", "last, total, , , , bias)\n}"))
    assert is_turned(after)
    assert [after.graph.node[-1].input[index] for index in (9, 10)] == ["position_ids", "bias"]
    np.testing.assert_allclose(stepped(after, [9], 4)[0], stepped(before, [9], 4)[0], atol=2e-6)


def test_layers_share_a_table_of_one_kind() -> None:
    second = "  z, key2, value2 = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1>\n"
    text = TURNED.replace("64] y,", "64] y, float[batch, sequence, 64] z,")
    text = text[: text.rindex("}")] + second + "    (qf, kf, v, past_key, past_value, last, total)\n}"
    _, after, _ = turned(text)
    first, other = (node for node in after.graph.node if node.op_type == "GroupQueryAttention")
    assert list(first.input[7:10]) == list(other.input[7:10])
    assert len([tensor for tensor in after.graph.initializer if len(tensor.dims) == 2]) == 2


# The first 8 numbers of every head, half of which are no multiple of 8.
_SMALL_PART = [
    ("middle = {16}", "middle = {4}, int64[1] part = {8}"),
    ("half = Mul (number, rates)", "some = Slice (rates, zero, middle)\n  half = Mul (number, some)"),
]
for _x in "qk":
    _SMALL_PART += [
        (f"  {_x}1 = Slice ({_x}t, zero", f"  {_x}p = Slice ({_x}t, zero, part, three)\n  {_x}1 = Slice ({_x}p, zero"),
        (f"{_x}2 = Slice ({_x}t", f"{_x}rest = Slice ({_x}t, part, end, three)\n  {_x}2 = Slice ({_x}p"),
        (f"Mul ({_x}t, cu)", f"Mul ({_x}p, cu)"),
        (f"  {_x}b =", f"  {_x}j = Concat <axis = -1> ({_x}a, {_x}rest)\n  {_x}b ="),
        (f"3]> ({_x}a)", f"3]> ({_x}j)"),
    ]
_NARROW = [("32]", "24]"), ("{16}", "{12}"), ("0, 0, 32", "0, 0, 24"), ("0, 0, 64", "0, 0, 48"), ("ce, 64]", "ce, 48]")]
LEFT: dict[str, list[tuple[str, str]]] = {
    "keys by other angles": [
        ("ks = Mul (kr, su)", "s2 = Mul (s, scale)\n  su2 = Unsqueeze (s2, one)\n  ks = Mul (kr, su2)")
    ],
    "keys that are not turned": [("(qf, kf, v", "(qf, plain, v"), ("  kt =", "  plain = Reshape (k, narrow)\n  kt =")],
    "halves by other angles": [
        ("(half, half)", "(half, other)"),
        ("  angles =", "  other = Mul (half, scale)\n  angles ="),
    ],
    "a small part of heads": _SMALL_PART,
    "heads of no multiple of 16": [
        *_NARROW,
        ("half = Mul (number, rates)", "some = Slice (rates, zero, middle)\n  half = Mul (number, some)"),
    ],
    "a window of one token": [("local_window_size = -1", "local_window_size = 1")],
    "angles of another input": [("Unsqueeze (position_ids", "Unsqueeze (input_ids")],
    "no input of positions": [("position_ids", "places")],
}


@pytest.mark.parametrize("kind", LEFT)
def test_is_left(kind: str) -> None:
    text = TURNED
    for old, new in LEFT[kind]:
        assert old in text
        text = text.replace(old, new)
    _, after, kinds = turned(text)
    assert not is_turned(after)
    assert kinds["Cos"] == 1


def test_tables_that_take_more_than_they_are_worth_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary_tables, "_LEAST_BYTES", 2 * 4 * POSITIONS * 16)
    assert is_turned(turned(TURNED)[1])
    assert not is_turned(turned(TURNED, POSITIONS + 1)[1])
    many = ", ".join(["1.0"] * 260_000)  # a hundredth of its bytes is as much again
    heavy = TURNED.replace("float[1] weight = {1.0}", f"float[260000] weight = {{{many}}}")
    assert is_turned(turned(heavy, POSITIONS + 1)[1])
