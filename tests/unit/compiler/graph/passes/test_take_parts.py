"""Values that are taken apart, and tokens that are picked, where the graph needs no more."""

from collections import Counter

import numpy as np
import onnxruntime
import pytest
from nestforge.compiler.graph.passes.take_parts import pick_tokens, take_parts
from support.graphs import graph_of, kinds, passed, require_same

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


@pytest.mark.parametrize(
    ("text", "operators"),
    [(SPLIT, "Neg Abs Sub"), (STEPS, "Neg Abs Reshape Reshape Sub")],
    ids=["split", "steps"],
)
def test_what_was_joined_is_read_before(text: str, operators: str) -> None:
    before, after, changed = passed(take_parts, text)
    assert changed
    assert kinds(after) == Counter(operators.split())
    require_same(before, after)


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
    assert not take_parts(graph_of(changed))


# ``x[:, at]`` as the exporter writes it.
PICK = """
<ir_version: 10, opset_import: ["" : 20]>
agraph (float[2, 5, 3] x, int64[4] at) => (float[2, 4, 3] y)
<int64[1] behind = {-1}>
{
  front = Transpose <perm = [1, 0, 2]> (x)
  numbers = Unsqueeze (at, behind)
  some = GatherND <batch_dims = 0> (front, numbers)
  y = Transpose <perm = [1, 0, 2]> (some)
}
"""


def test_tokens_are_picked_by_one_node() -> None:
    before, after, changed = passed(pick_tokens, PICK)
    assert changed
    assert kinds(after) == {"Gather": 1}
    feeds = {"x": np.arange(30, dtype=np.float32).reshape(2, 5, 3), "at": np.array([4, 0, -1, 2])}
    found = [onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)[0] for proto in (before, after)]
    np.testing.assert_array_equal(found[0], feeds["x"][:, feeds["at"]])
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y = Transpose <perm = [1, 0, 2]>", "y = Transpose <perm = [0, 1, 2]>"),
        ("front = Transpose <perm = [1, 0, 2]>", "front = Transpose <perm = [1, 2, 0]>"),
        ("{-1}", "{0}"),
        ("int64[4] at", "int64[4, 1] at"),
    ],
)
def test_what_picks_otherwise_is_left(old: str, new: str) -> None:
    text = PICK.replace(old, new)
    assert text != PICK
    assert not pick_tokens(graph_of(text))
