from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from nestforge.compiler.graph.passes.pick_tokens import pick_tokens
from support.graphs import graph_of, kinds, passed

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
