"""Extents with names: products and their factors, and targets of Reshapes that are read from an input."""

import numpy as np
import onnx_ir as ir
import pytest
from nestforge.compiler.graph.passes.matching import extents, factors, product, reshape_target
from nestforge.errors import SliceError
from onnx.reference import ReferenceEvaluator


@pytest.mark.parametrize(
    ("dims", "whole"),
    [
        ((2, 3), 6),
        ((1, "sequence"), "sequence"),
        (("batch", "sequence"), "batch*sequence"),
        (("batch", 5, 8), "batch*40"),
        (("batch*5", 8, "sequence"), "batch*40*sequence"),
        (("sequence + 1", 4), "sequence + 1*4"),
        ((), 1),
    ],
)
def test_a_product_keeps_its_factors_in_order(dims: tuple[int | str, ...], whole: int | str) -> None:
    assert product(dims) == whole
    assert product(factors(whole)) == whole


def test_extents_are_known_altogether_or_not_at_all() -> None:
    assert extents(ir.val("x", shape=ir.Shape(["batch", 4]))) == ("batch", 4)
    assert extents(ir.val("x", shape=ir.Shape([None, 4]))) is None
    assert extents(ir.val("x")) is None
    assert extents(None) is None


def test_a_target_reads_free_dimensions_from_an_input_that_has_them() -> None:
    int64 = ir.TensorType(ir.DataType.INT64)
    first = ir.val("pixels", shape=ir.Shape(["batch", 4]), type=int64)
    second = ir.val("ids", shape=ir.Shape(["batch", "sequence"]), type=int64)
    graph = ir.Graph([first, second], [], nodes=[], opset_imports={"": 20})
    made = reshape_target(graph, ["batch", "sequence", -1, 8])
    assert made[-1].outputs[0].shape == ir.Shape([4])
    graph.extend(made)
    graph.outputs.append(made[-1].outputs[0])
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    feeds = {"pixels": np.zeros((3, 4), np.int64), "ids": np.zeros((3, 7), np.int64)}
    (found,) = ReferenceEvaluator(model).run(None, feeds)
    assert found.tolist() == [3, 7, -1, 8]


def test_a_target_of_numbers_is_a_constant() -> None:
    (constant,) = reshape_target(ir.Graph([], [], nodes=[]), [2, -1])
    tensor = ir.convenience.get_const_tensor(constant.outputs[0])
    assert tensor.numpy().tolist() == [2, -1]


def test_a_dimension_that_no_input_has_is_an_error() -> None:
    with pytest.raises(SliceError, match="no input of the graph has a dimension sequence"):
        reshape_target(ir.Graph([], [], nodes=[]), ["sequence", 4])


def test_a_dimension_that_the_graph_computes_is_read_from_a_value_beside() -> None:
    """Such as the tokens that a layer selects of a text of any length."""
    selected = ir.Value(name="selected", shape=ir.Shape(["(sequence + 2)//3", 8]))
    size, _, target = reshape_target(ir.Graph([], [], nodes=[]), ["(sequence + 2)//3", -1], [selected])
    assert (size.op_type, size.inputs[0], size.attributes.get_int("start")) == ("Shape", selected, 0)
    assert target.op_type == "Concat"
