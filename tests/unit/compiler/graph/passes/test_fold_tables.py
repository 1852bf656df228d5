"""Graphs that compute a mask from constants, and what is left of them."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nestforge.compiler.graph.passes import fold_tables as module
from nestforge.compiler.graph.passes.fold_tables import drop_open_masks, fold_tables
from onnx_ir.passes.common import RemoveUnusedNodesPass
from support.graphs import kinds, passed, require_same

# A causal mask over SIZE positions, and a step that depends on the input.
CAUSAL = """
<ir_version: 10, opset_import: ["" : 20]>
attention (float[SIZE, SIZE] scores) => (float[SIZE, SIZE] y)
<int64 start = {0}, int64 stop = {SIZE}, int64 step = {1}, int64[1] rows = {1}, float zero = {0}, float low = {-9}>
{
  places = Range (start, stop, step)
  queries = Unsqueeze (places, rows)
  seen = GreaterOrEqual (queries, places)
  mask = Where (seen, zero, low)
  masked = Add (scores, mask)
  y = Neg (masked)
}
"""


def folded(text: str) -> tuple[onnx.ModelProto, ir.Model, bool]:
    before = onnx.parser.parse_model(text)
    model = ir.from_proto(before)
    changed = fold_tables(model)
    RemoveUnusedNodesPass()(model)
    for number, value in enumerate(list(model.graph.initializers.values())):
        value.name = f"i{number}"
    return before, model, changed


def run(model: onnx.ModelProto, feed: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"scores": feed})[0]


def test_what_depends_on_no_input_is_computed_once() -> None:
    before, after, changed = folded(CAUSAL.replace("SIZE", "6"))
    assert changed
    assert Counter(node.op_type for node in after.graph) == {"Add": 1, "Neg": 1}
    (table,) = after.graph.initializers.values()
    np.testing.assert_array_equal(table.const_value.numpy(), np.where(np.tri(6), np.float32(0), np.float32(-9)))
    feed = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    np.testing.assert_array_equal(run(ir.to_proto(after), feed), run(before, feed))


def test_distances_are_cut_off_at_a_constant() -> None:
    """A lower bound, an upper bound left out or in its place: what buckets of distances are made of."""
    _, after, _ = folded("""
    <ir_version: 10, opset_import: ["" : 20]>
    distances (int64[3] scores) => (int64[3] y)
    <int64[3] steps = {-2, 0, 5}, int64 zero = {0}, int64 most = {3}>
    {
      ahead = Clip (steps, zero)
      near = Clip (steps, , most)
      sum = Sub (ahead, near)
      y = Add (scores, sum)
    }
    """)
    assert [node.op_type for node in after.graph] == ["Add"]
    (table,) = after.graph.initializers.values()
    assert table.const_value.numpy().tolist() == [2, 0, 2]


def test_a_table_above_the_limit_stays_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_TABLE_BYTES", 8 * 6)
    _, after, changed = folded(CAUSAL.replace("SIZE", "6"))
    assert changed, "the numbers of positions are small"
    kinds = Counter(node.op_type for node in after.graph)
    assert kinds == {"Where": 1, "Add": 1, "Neg": 1}, "the mask in bytes fits, in floats it does not"


def test_what_is_no_larger_than_what_it_is_made_of_is_folded_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_TABLE_BYTES", 0)
    matrix = ", ".join(map(str, range(6)))
    text = f"""
    <ir_version: 10, opset_import: ["" : 20]>
    transform (float[2, 4] scores) => (float[2, 6] y)
    <float[2, 3] left = {{{matrix}}}, float[2, 3] right = {{{matrix}}}>
    {{
      both = Concat <axis=0> (left, right)
      y = MatMul (scores, both)
    }}
    """.replace("[2, 6] y", "[2, 3] y")
    _, after, changed = folded(text)
    assert changed
    assert [node.op_type for node in after.graph] == ["MatMul"]


def test_an_output_and_what_follows_an_input_are_left_alone() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    plain (float[2] scores) => (float[2] y, float[2] z) <float[2] ones = {1, 1}>
    {
      z = Neg (ones)
      y = Add (scores, ones)
    }
    """
    _, after, changed = folded(text)
    assert not changed
    assert [node.op_type for node in after.graph] == ["Neg", "Add"]


# Two layers' scores and one mask of positions, as transformers' vision encoders trace.
MASKED = """
<ir_version: 10, opset_import: ["" : 20]>
attention (float[2, 3, 5, 5] first, float[2, 3, 5, 5] second) => (float[2, 3, 5, 5] y, float[2, 3, 5, 5] z)
<int64 start = {0}, int64 stop = {5}, int64 step = {1}, int64[3] axes = {0, 1, 2}, int64 least = {LEAST},
 int64[4] whole = {2, 1, 5, 5}, float zero = {KEPT}, float low = {-1e30}>
{
  places = Range (start, stop, step)
  keys = Unsqueeze (places, axes)
  seen = GreaterOrEqual (keys, least)
  open = Expand (seen, whole)
  mask = Where (open, zero, low)
  a = Add (first, mask)
  y = Softmax <axis=-1> (a)
  b = Add (mask, second)
  z = Softmax <axis=-1> (b)
}
"""


OPEN = MASKED.replace("LEAST", "0").replace("KEPT", "0.0")


@pytest.mark.parametrize(
    "text",
    [OPEN, OPEN.replace("a = Add (first, mask)", "f = Add (first, mask) a = Add (f, mask)")],
    ids=["one", "two, one behind the other"],
)
def test_masks_that_let_everything_through_are_gone(text: str) -> None:
    before, after, changed = passed(drop_open_masks, text)
    assert changed
    assert kinds(after) == {"Softmax": 2}
    require_same(before, after)


@pytest.mark.parametrize(
    "text",
    [
        MASKED.replace("LEAST", "1").replace("KEPT", "0.0"),  # the first position is hidden
        MASKED.replace("LEAST", "0").replace("KEPT", "0.5"),  # adds something
        OPEN.replace("int64 start = {0}, ", "").replace("attention (", "attention (int64 start, "),  # an input decides
    ],
    ids=["hides", "adds", "input"],
)
def test_any_other_mask_stays(text: str) -> None:
    before, after, changed = passed(drop_open_masks, text)
    assert not changed
    assert kinds(after) == kinds(before)


def test_a_mask_larger_than_the_scores_stays() -> None:
    """The sum has the mask's shape, which the scores alone would not."""
    _, after, changed = passed(drop_open_masks, OPEN.replace("(float[2, 3, 5, 5] first", "(float[1, 3, 5, 5] first"))
    assert changed, "the second sum has its scores' shape"
    assert kinds(after)["Add"] == 1


def test_a_condition_that_cannot_be_computed_changes_nothing() -> None:
    """The second mask's condition fails when it is judged, behind an Add that could have been dropped."""
    text = OPEN.replace("int64[4] whole", "int64[2] bad = {2, 3}, int64[4] whole").replace(
        "b = Add (mask, second)",
        "wrong = Expand (seen, bad) other = Where (wrong, zero, low) b = Add (other, second)",
    )
    model = ir.from_proto(onnx.parser.parse_model(text))
    for value in (value for node in model.graph for value in node.outputs if node.op_type == "Add"):
        value.shape = ir.Shape((2, 3, 5, 5))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(ValueError, match="broadcast"):
        drop_open_masks(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
