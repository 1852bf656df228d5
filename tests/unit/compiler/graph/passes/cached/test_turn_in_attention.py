"""Attention that turns queries and keys itself: the same numbers from a table, and what is left as it is."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nestforge.compiler.graph.passes.cached import turn_in_attention as pass_module
from nestforge.compiler.graph.passes.cached.turn_in_attention import turn_in_attention
from onnx_ir.passes.common import RemoveUnusedNodesPass

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
  at = Unsqueeze (position_ids, two)
  number = Cast <to = 1> (at)
  half = Mul (number, rates)
  angles = Concat <axis = -1> (half, half)
  cosine = Cos (angles)
  c = Mul (cosine, scale)
  sine = Sin (angles)
  s = Mul (sine, scale)
  cu = Unsqueeze (c, one)
  su = Unsqueeze (s, one)
  qt = Transpose <perm = [0, 2, 1, 3]> (q)
  q1 = Slice (qt, zero, middle, three)
  q2 = Slice (qt, middle, end, three)
  qn = Neg (q2)
  qr = Concat <axis = -1> (qn, q1)
  qc = Mul (qt, cu)
  qs = Mul (qr, su)
  qa = Add (qc, qs)
  qb = Transpose <perm = [0, 2, 1, 3]> (qa)
  qf = Reshape (qb, wide)
  kt = Transpose <perm = [0, 2, 1, 3]> (k)
  k1 = Slice (kt, zero, middle, three)
  k2 = Slice (kt, middle, end, three)
  kn = Neg (k2)
  kr = Concat <axis = -1> (kn, k1)
  kc = Mul (kt, cu)
  ks = Mul (kr, su)
  ka = Add (kc, ks)
  kb = Transpose <perm = [0, 2, 1, 3]> (ka)
  kf = Reshape (kb, narrow)
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
    turn_in_attention(model, count, {"weight"})
    RemoveUnusedNodesPass()(model)
    return before, ir.to_proto(model), Counter(node.op_type for node in model.graph)


def is_turned(proto: onnx.ModelProto) -> bool:
    attributes = (attribute for node in proto.graph.node for attribute in node.attribute)
    return any(attribute.name == "do_rotary" and attribute.i for attribute in attributes)


def run(proto: onnx.ModelProto, last: list[int], tokens: int = 1, slid: int = 0) -> list[np.ndarray]:
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
    found: list[np.ndarray] = session.run(None, {name: array for name, array in feeds.items() if name in left})
    return found


# Chunks of a text, from its beginning and behind others, drafted tokens that are checked, and rows that step together.
@pytest.mark.parametrize(
    ("last", "tokens"),
    [([4], 5), ([16], 17), ([63], 64), ([POSITIONS - 1], 64), ([40], 5), ([41], 1), ([*range(3, 35)], 1), ([0, 0], 1)],
)
def test_numbers_are_those_of_the_nodes(last: list[int], tokens: int) -> None:
    before, after, kinds = turned(TURNED)
    assert kinds == {"Reshape": 2, "GroupQueryAttention": 1}
    for own, expected in zip(run(after, last, tokens), run(before, last, tokens), strict=True):
        np.testing.assert_allclose(own, expected, atol=2e-6)


@pytest.mark.parametrize(("last", "tokens"), [([9], 5), ([4], 5), ([8, 3, 20], 1), ([3, 3, 3], 1)])
def test_places_in_a_window_are_not_positions(last: list[int], tokens: int) -> None:
    before, after, _ = turned(OF_A_WINDOW)
    assert is_turned(after)
    for own, expected in zip(run(after, last, tokens, slid=13), run(before, last, tokens, slid=13), strict=True):
        np.testing.assert_allclose(own, expected, atol=2e-6)


def test_the_last_position_is_the_tables_last_row_and_none_is_read_behind_it() -> None:
    before, after, _ = turned(TURNED, count=60)
    assert [list(tensor.dims) for tensor in after.graph.initializer if len(tensor.dims) == 2] == [[60, 16]] * 2
    np.testing.assert_allclose(run(after, [59], 3)[0], run(before, [59], 3)[0], atol=2e-6)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match="less than total_seq"):
        run(after, [60], 3)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match=r"out of range \[0, 60\)"):
        run(after, [4], 3, slid=56)


def test_queries_of_keys_that_are_there_already_are_turned_alone() -> None:
    before, after, kinds = turned(READING)
    assert is_turned(after)
    assert kinds == {"Reshape": 1, "Slice": 2, "GroupQueryAttention": 1}
    for last, tokens in (([9], 1), ([9], 4), ([7, 3], 1)):
        for own, expected in zip(run(after, last, tokens), run(before, last, tokens), strict=True):
            np.testing.assert_allclose(own, expected, atol=2e-6)


def test_a_bias_keeps_its_place() -> None:
    before, after, _ = turned(TURNED.replace("last, total)\n}", "last, total, , , , bias)\n}"))
    assert is_turned(after)
    assert [after.graph.node[-1].input[index] for index in (9, 10)] == ["position_ids", "bias"]
    np.testing.assert_allclose(run(after, [9], 4)[0], run(before, [9], 4)[0], atol=2e-6)


def test_layers_share_a_table_of_one_kind() -> None:
    second = "  z, key2, value2 = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1>\n"
    text = TURNED.replace("64] y,", "64] y, float[batch, sequence, 64] z,")
    text = text[: text.rindex("}")] + second + "    (qf, kf, v, past_key, past_value, last, total)\n}"
    _, after, _ = turned(text)
    first, other = (node for node in after.graph.node if node.op_type == "GroupQueryAttention")
    assert list(first.input[7:10]) == list(other.input[7:10])
    assert len([tensor for tensor in after.graph.initializer if len(tensor.dims) == 2]) == 2


# Of every head the first 8 numbers, half of which are no multiple of 8.
_PART = [
    ("middle = {16}", "middle = {4}, int64[1] part = {8}"),
    ("half = Mul (number, rates)", "some = Slice (rates, zero, middle)\n  half = Mul (number, some)"),
]
for _x in "qk":
    _PART += [
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
    "a small part of heads": _PART,
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
    monkeypatch.setattr(pass_module, "_LEAST_BYTES", 2 * 4 * POSITIONS * 16)
    assert is_turned(turned(TURNED)[1])
    assert not is_turned(turned(TURNED, POSITIONS + 1)[1])
    many = ", ".join(["1.0"] * 260_000)  # a hundredth of its bytes is as much again
    heavy = TURNED.replace("float[1] weight = {1.0}", f"float[260000] weight = {{{many}}}")
    assert is_turned(turned(heavy, POSITIONS + 1)[1])
