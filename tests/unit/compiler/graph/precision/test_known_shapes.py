from __future__ import annotations

import onnx
from nestforge.compiler.graph.precision.known_shapes import ranks_of, reshape_targets, rows_of

# Rows of a table with their tokens, in heads and back, beside what nothing is known of.
GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
agraph (int64[batch, tokens] ids) => (float[batch, tokens, 8] y)
<int64[1] width = {8}, int64[2] heads = {2, 4}, int64[1] last = {-1}, float[5, 8] table = {0}, float[8] weight = {0}>
{
  whole = Shape (ids)
  front = Shape <start = 0, end = 1> (ids)
  apart = Concat <axis = 0> (whole, heads)
  back = Concat <axis = 0> (whole, width)
  behind = Unsqueeze (ids, last)
  looked = Gather (table, ids)
  scaled = Mul (looked, weight)
  split = Reshape (scaled, apart)
  turned = Transpose <perm = [0, 2, 1, 3]> (split)
  unknown = Expand (turned, front)
  added = Add (unknown, weight)
  y = Reshape (added, back)
}
"""


def test_targets_are_known_by_the_dimensions_of_the_inputs() -> None:
    targets = reshape_targets(onnx.parser.parse_model(GRAPH))
    assert targets["whole"] == ("batch", "tokens"), "without an end it is the whole shape"
    assert targets["front"] == ("batch",)
    assert (targets["apart"], targets["back"]) == (("batch", "tokens", 2, 4), ("batch", "tokens", 8))


def test_dimensions_are_counted_where_operators_say_them() -> None:
    proto = onnx.parser.parse_model(GRAPH)
    ranks = ranks_of(proto, reshape_targets(proto))
    found = {
        name: ranks.get(name) for name in ("behind", "looked", "scaled", "split", "turned", "unknown", "added", "y")
    }
    assert found == {
        "behind": 3,
        "looked": 3,
        "scaled": 3,
        "split": 4,
        "turned": 4,
        "unknown": None,
        "added": None,
        "y": 3,
    }


def test_rows_and_tokens_follow_the_ids_and_the_targets() -> None:
    proto = onnx.parser.parse_model(GRAPH)
    targets, rows = reshape_targets(proto), {"ids": ("batch", "tokens")}
    nodes = {node.output[0]: node for node in proto.graph.node}
    assert rows_of(nodes["looked"], rows, targets) == ("batch", "tokens")
    assert rows_of(nodes["y"], {}, targets) == ("batch", "tokens")
    assert rows_of(nodes["unknown"], rows, targets) is None
