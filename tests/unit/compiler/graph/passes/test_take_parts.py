from __future__ import annotations

from collections import Counter

import pytest
from nestforge.compiler.graph.passes.take_parts import take_parts
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
