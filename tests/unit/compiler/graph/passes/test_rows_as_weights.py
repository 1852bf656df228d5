from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from nestforge.compiler.graph.passes.rows_as_weights import rows_as_weights, stack_of
from nestforge.compiler.graph.store import StoredTensor
from nestforge.elastic import ElasticSpec

STACKED = """
<ir_version: 10, opset_import: ["" : 20]>
graph (float[2, 2] x, int64 which) => (float[2, 3] y, float[2, 3] z, float[2, 3] given)
<float[2, 2, 3] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, int64 second = {1}, int64 last = {-1}, int64[1] few = {1}>
{
    one = Gather (w, second)
    again = Gather (w, last)
    listed = Gather (w, few)
    first = Gather (listed, which)
    y = MatMul (x, one)
    s = MatMul (x, again)
    z = Add (s, first)
    given = Gather (w, which)
}
"""


def test_a_row_taken_by_a_constant_is_a_weight() -> None:
    model = ir.from_proto(onnx.parser.parse_model(STACKED))
    assert rows_as_weights(model, {"w"}) == {"w[1]"}
    row = model.graph.initializers["w[1]"]
    np.testing.assert_array_equal(row.const_value.numpy(), [[6, 7, 8], [9, 10, 11]])
    assert [str(extent) for extent in row.shape] == ["2", "3"]
    assert [use.node.op_type for use in row.uses()] == ["MatMul", "MatMul"]
    # A list of rows, and a row that an input names, are not.
    left = [node.inputs[1].name for node in model.graph if node.op_type == "Gather" and node.outputs[0].uses()]
    assert left == ["few", "which"]


def test_other_tables_are_left_alone() -> None:
    model = ir.from_proto(onnx.parser.parse_model(STACKED))
    assert rows_as_weights(model, {"v"}) == set()
    assert "w[1]" not in model.graph.initializers


@pytest.mark.parametrize(
    ("name", "parts"),
    [("a.b[12]", ("a.b", 12)), ("a.b", ("a.b", None)), ("a[x]", ("a[x]", None)), ("a.b.T", ("a.b.T", None))],
)
def test_names_of_rows(name: str, parts: tuple[str, int | None]) -> None:
    assert stack_of(name) == parts


def test_a_row_of_the_store_is_a_view() -> None:
    stack = StoredTensor(offset=400, shape=(4, 2, 3), itemsize=4, cut=None)
    assert stack.row(3) == StoredTensor(offset=400 + 3 * 24, shape=(2, 3), itemsize=4, cut=None)
    assert stack.row(3).length(ElasticSpec((), ()).universal()) == 24
