"""Heads of attention over a cache: found as axes, and set where a submodel is emitted."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from nestforge.compiler.graph.passes.cached.head_axes import HeadAxes, head_axes, set_dims, set_heads
from nestforge.compiler.graph.passes.dims_by_operator import Elastic
from nestforge.elastic import Axis, ElasticSpec
from nestforge.errors import SliceError

HEADS = Axis("layers.0.heads", 4)
SEEDS = {name: (Elastic(HEADS), 8) for name in ("q", "k")}
ATTENTION = """
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
attend (float[1, 1, 32] x, float[1, 4, C, 8] past_key, float[1, 4, C, 8] past_value, int32[1] last, int32 total,
        float[1, 4, 1, T] bias)
    => (float[1, 1, 32] y, float[1, 4, C, 8] present_key, float[1, 4, C, 8] present_value)
<float[32, 32] q, float[32, 32] k, float[32, 32] o, int64[2] rows = {1, 32}, int64[3] wide = {1, 1, 32}>
{
  flat = Reshape (x, rows)
  queries = Gemm <transB=1> (flat, q)
  keys = Gemm <transB=1> (flat, k)
  a = Reshape (queries, wide)
  b = Reshape (keys, wide)
  found, present_key, present_value = com.microsoft.GroupQueryAttention <num_heads=4, kv_num_heads=4>
    (a, b, b, past_key, past_value, last, total)
  s = Reshape (found, rows)
  t = Gemm (s, o)
  y = Reshape (t, wide)
}
"""


def model(text: str = ATTENTION) -> ir.Model:
    proto = onnx.parser.parse_model(text)
    given = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.value_info:
        if value.name not in given:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), value.name))
    found = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    for node in found.graph:
        if node.op_type == "GroupQueryAttention":
            node.outputs[0].shape = ir.Shape([1, 1, 32])
        if node.outputs[0].name == "s":
            node.outputs[0].shape = ir.Shape([1, 32])
    return found


def named(found: dict[ir.Value, HeadAxes]) -> dict[str | None, HeadAxes]:
    return {value.name: axes for value, axes in found.items()}


def test_heads_that_shrink_are_found_and_set() -> None:
    own = model()
    seeds = {**SEEDS, "o": (Elastic(HEADS), 8)}
    axes = named(head_axes(own, seeds))
    assert axes == {"found": HeadAxes(HEADS.name, HEADS.name)}
    proto = ir.to_proto(own)
    set_heads(proto, {"found": axes["found"]}, ElasticSpec((HEADS,), ()).submodel({HEADS.name: 3}))
    (attention,) = (node for node in proto.graph.node if node.op_type == "GroupQueryAttention")
    assert {attribute.name: attribute.i for attribute in attention.attribute} == {"num_heads": 3, "kv_num_heads": 3}
    kept = ("past_key", "past_value", "present_key", "present_value")
    set_dims(proto, {name: {1: HEADS.name} for name in kept}, ElasticSpec((HEADS,), ()).submodel({HEADS.name: 3}))
    heads = {
        tensor.name: tensor.type.tensor_type.shape.dim[1].dim_value
        for tensor in (*proto.graph.input, *proto.graph.output)
        if "_" in tensor.name
    }
    assert heads == dict.fromkeys(kept, 3)


def test_heads_of_queries_alone_leave_the_cache_as_it_is() -> None:
    own = model()
    axes = named(head_axes(own, {"q": (Elastic(HEADS), 8), "o": (Elastic(HEADS), 8)}))
    assert axes == {"found": HeadAxes(HEADS.name, None)}
    proto = ir.to_proto(own)
    set_heads(proto, {"found": axes["found"]}, ElasticSpec((HEADS,), ()).submodel({HEADS.name: 1}))
    (attention,) = (node for node in proto.graph.node if node.op_type == "GroupQueryAttention")
    assert {attribute.name: attribute.i for attribute in attention.attribute} == {"num_heads": 1, "kv_num_heads": 4}
    assert proto.graph.input[1].type.tensor_type.shape.dim[1].dim_value == 4


def test_nothing_shrinks_of_a_model_without_elastic_heads() -> None:
    assert head_axes(model(), {}) == {}


def test_a_bias_that_keeps_its_heads_is_refused() -> None:
    text = ATTENTION.replace("last, total)\n", "last, total, x, x, x, bias)\n")
    with pytest.raises(SliceError, match="a bias whose heads do not shrink with the queries'"):
        head_axes(model(text), {**SEEDS, "o": (Elastic(HEADS), 8)})


def test_sizes_of_heads_that_shrink_are_read_off_the_inputs() -> None:
    """As many heads as before, each narrower: no attribute says how wide."""
    assert head_axes(model(), {name: (4, Elastic(Axis("layers.0.size", 8))) for name in ("q", "k", "o")}) == {}


def test_what_is_neither_heads_nor_their_size_is_refused() -> None:
    seeds = {name: (2, Elastic(Axis("layers.0.some", 2)), 8) for name in ("q", "k", "o")}
    with pytest.raises(SliceError, match="what shrinks of input 0 is not its heads"):
        head_axes(model(), seeds)


def test_sizes_of_heads_that_are_turned_by_tables_may_not_shrink() -> None:
    text = ATTENTION.replace("last, total)\n", "last, total, angles, angles, places)\n")
    turned = model(text.replace("int32 total,", "int32 total, float[9, 4] angles, int64[1, 1] places,"))
    assert head_axes(turned, SEEDS | {"o": (Elastic(HEADS), 8)})
    with pytest.raises(SliceError, match="node found: heads turned by tables, whose size shrinks"):
        head_axes(turned, {name: (4, Elastic(Axis("layers.0.size", 8))) for name in ("q", "k", "o")})
