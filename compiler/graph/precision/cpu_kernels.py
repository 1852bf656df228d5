"""Small numbers on ONNX Runtime's CPU provider: the kernels themselves, since its own rewriting is off in an engine.

Its integer product is fast for uint8 activations and int8 weights alone (signed activations are 10 to 30 times slower),
so int8 activations with zero point 0 become uint8 ones with zero point 128: the same integers, and exactly the same
sums. Biases are added in float32: as int32 inside the product they would depend on the calibrated scale, a tensor for
every bias and scale, and were not measurably faster. Zero points of the weights are stored, since the kernel wants as
many as there are scales.

A scale that is found at run time is that of one row (a token), so that no row changes another: the kernel takes one
scale and one zero point of all activations, so rows are divided by their largest magnitudes, rounded around 128, and
the sums multiplied by these (docs/decisions/0047).

Integer products give the same numbers packed and from mapped weights. ``MatMulNBits`` does not: packed it multiplies
integers, mapped it decodes the whole weight in every run and multiplies in float32, which takes longer than float32.

Requires and ensures what ``quantize`` does, but for ``MatMulNBits``: see ``fix_extents``.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import TensorProto, helper

from ....profiles.precision import (
    INT4,
    INT4_BLOCK,
    INT4_SCALE,
    INT8,
    INT8_SCALE,
    INT8_ZERO,
    LEAST_INPUTS,
    LEAST_OUTPUTS,
    encoded_shape,
)
from ..encodings import split_encoding
from ..passes.linear_to_gemm import TRANSPOSED
from .edit import MICROSOFT, Edit, uses
from .quantize import Product, products

_MATMUL_N_BITS = "MatMulNBits"
# Of MatMulNBits: activations are quantised to int8, block by block, so that the sums are of integers.
_INT8_ACCURACY_LEVEL = 4
_MIDDLE = np.array(128, np.uint8)


def as_qgemm(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The graph that ``quantized`` returns, by ``QuantizeLinear`` to uint8 and ``QGemm``; the same integers."""
    edit = Edit(proto)
    producers = {name: node for node in edit.source for name in node.output}
    middle = edit.constant(_MIDDLE)
    done: dict[str, str] = {}
    for node in edit.source:
        x, weight = (producers.get(name) for name in node.input[:2]) if node.op_type == "Gemm" else (None, None)
        if x is None or weight is None or {x.op_type, weight.op_type} != {"DequantizeLinear"}:
            edit.nodes.append(node)
            continue
        value, scale = producers[x.input[0]].input[0], x.input[1]
        if x.input[0] not in done:
            done[x.input[0]] = edit.add("QuantizeLinear", [value, scale, middle])
        plain, _ = split_encoding(weight.input[0])
        bias = node.input[2] if len(node.input) > 2 else None
        extents = edit.initializers[weight.input[0]].dims
        transposed = plain.endswith(TRANSPOSED)
        inputs, outputs = extents if transposed else reversed(extents)
        product = Product(value, plain, bias, node.output[0], inputs, outputs, transposed)
        _integer_product(edit, product, [done[x.input[0]], scale, middle])
    return edit.done()


def dynamic(proto: onnx.ModelProto, kept: Collection[str]) -> onnx.ModelProto:
    """The float32 template ``proto`` as int8-dynamic: each row of activations is scaled at run time, by the largest
    magnitude in it; no calibration is needed."""
    return _scaled_at_run_time(proto, kept, frozenset())


def weight_only(proto: onnx.ModelProto, kept: Collection[str]) -> onnx.ModelProto:
    """The float32 template ``proto`` as int4: ``MatMulNBits`` where outputs shrink, elsewhere as int8-dynamic.

    A weight whose inputs shrink has no blocks of 32 that every prefix holds whole; nor has one that is a table too if
    its rows are no such blocks: that is int8 in both places. Call ``fix_extents`` on every graph that is emitted from
    the result.
    """
    tables = {node.input[0] for node in proto.graph.node if node.op_type == "Gather"}
    blocked = {
        product.output
        for product in products(proto.graph, kept).values()
        if not product.transposed and (product.inputs % INT4_BLOCK == 0 or product.weight not in tables)
    }
    return _scaled_at_run_time(proto, kept, blocked)


def small_tables(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Embedding tables in int8 with a scale for each row: ``Gather(W, ids)`` reads a quarter of the bytes. One that a
    product reads in 4 bits is read so here too.

    A table whose numbers something else reads in float32 too stays as it is: it would only be stored twice.
    """
    edit, read = Edit(proto), uses(proto.graph)
    gathers = {node.output[0]: node.input[0] for node in edit.source if _is_table(edit, node)}
    whole = {table for table in gathers.values() if list(gathers.values()).count(table) == read[table]}
    for node in edit.source:
        table = gathers.get(node.output[0], "")
        if table not in whole:
            edit.nodes.append(node)
        elif table + INT4 in edit.initializers:
            _rows_in_blocks(edit, node, table)
        else:
            _rows(edit, node, table)
    return edit.done()


def _rows(edit: Edit, gather: onnx.NodeProto, table: str) -> None:
    """What ``gather`` takes, from integers with a scale for each row."""
    (rows, width), ids = edit.initializers[table].dims, gather.input[1]
    integers = edit.encoded(table, INT8, TensorProto.INT8, [rows, width])
    scale = edit.encoded(table, INT8_SCALE, TensorProto.FLOAT, [rows])
    taken = edit.add("Cast", [edit.add("Gather", [integers, ids], axis=0)], to=TensorProto.FLOAT)
    last = edit.constant(np.array([-1], np.int64))
    edit.add("Mul", [taken, edit.add("Unsqueeze", [edit.add("Gather", [scale, ids], axis=0), last])], gather.output)


def _rows_in_blocks(edit: Edit, gather: onnx.NodeProto, table: str) -> None:
    """What ``gather`` takes, from the bytes ``[rows, blocks, 16]`` that a product reads.

    A byte is looked up as the two numbers in it. ``GatherBlockQuantized`` would be one node, but wants bytes and scales
    of other dimensions than the product, which a view of the store cannot have beside them.
    """
    ids, width = gather.input[1], edit.initializers[table].dims[1]
    low, high = np.arange(256) % 16 - 8, np.arange(256) // 16 - 8
    pairs = edit.constant(np.stack([low, high], axis=1).astype(np.float32))
    taken = edit.add("Cast", [edit.add("Gather", [table + INT4, ids], axis=0)], to=TensorProto.INT32)
    numbers = edit.add("Gather", [pairs, taken], axis=0)  # [..., blocks, 16, 2]
    scales = edit.add("Gather", [table + INT4_SCALE, ids], axis=0)
    last = edit.constant(np.array([-2, -1], np.int64))
    scaled = edit.add("Mul", [numbers, edit.add("Unsqueeze", [scales, last])])
    shape = edit.add("Concat", [edit.add("Shape", [ids]), edit.constant(np.array([width], np.int64))], axis=0)
    edit.add("Reshape", [scaled, shape], gather.output)


def _scaled_at_run_time(proto: onnx.ModelProto, kept: Collection[str], blocked: Collection[str]) -> onnx.ModelProto:
    """Every product but ``kept``: the ones that make ``blocked`` in 4 bits, the others of integers, row by row."""
    edit, changed = Edit(proto), products(proto.graph, kept)
    done: dict[str, tuple[list[str], str]] = {}
    for node in edit.source:
        product = changed.get(node.output[0])
        if product is None:
            edit.nodes.append(node)
        elif product.output in blocked:
            _blocked_product(edit, product)
        else:
            if product.x not in done:
                done[product.x] = _integer_rows(edit, product.x)
            _integer_product(edit, product, *done[product.x])
    return edit.done()


def _integer_rows(edit: Edit, x: str) -> tuple[list[str], str]:
    """``x [..., in]`` as integers, their scale and their zero point, in units of each row's largest magnitude, which is
    the second ``[..., 1]``.

    A row of zeros is divided by 0 and becomes any integers: 0 times what they sum to is the product.
    """
    largest = edit.add("ReduceMax", [edit.add("Abs", [x]), edit.constant(np.array([-1], np.int64))])
    step, middle = edit.constant(np.array(1 / 127, np.float32)), edit.constant(_MIDDLE)
    return [edit.add("QuantizeLinear", [edit.add("Div", [x, largest]), step, middle]), step, middle], largest


def _integer_product(edit: Edit, product: Product, x: list[str], unit: str | None = None) -> None:
    """``x`` are the integers, their scale and their zero point, perhaps in a ``unit`` of each row."""
    weight = [
        edit.encoded(product.weight, INT8, TensorProto.INT8, product.shape),
        edit.encoded(product.weight, INT8_SCALE, TensorProto.FLOAT, [product.outputs]),
        edit.encoded(product.weight, INT8_ZERO, TensorProto.INT8, [product.outputs]),
    ]
    after = [(kind, operand) for kind, operand in (("Mul", unit), ("Add", product.bias)) if operand]
    names: list[list[str] | int] = [*[1] * len(after), [product.output]]
    value = edit.add("QGemm", [*x, *weight], names[0], MICROSOFT, transB=int(not product.transposed))
    for (kind, operand), name in zip(after, names[1:], strict=True):
        value = edit.add(kind, [value, operand], name)


def _blocked_product(edit: Edit, product: Product) -> None:
    weight = edit.encoded(product.weight, INT4, TensorProto.UINT8, encoded_shape(product.shape, INT4))
    scale = edit.encoded(product.weight, INT4_SCALE, TensorProto.FLOAT, encoded_shape(product.shape, INT4_SCALE))
    edit.add(
        _MATMUL_N_BITS,
        [product.x, weight, scale, *(["", "", product.bias] if product.bias else [])],
        [product.output],
        MICROSOFT,
        K=product.inputs,
        N=product.outputs,
        bits=4,
        block_size=INT4_BLOCK,
        accuracy_level=_INT8_ACCURACY_LEVEL,
    )


def _is_table(edit: Edit, node: onnx.NodeProto) -> bool:
    table = edit.initializers.get(node.input[0]) if node.op_type == "Gather" else None
    if table is None or table.data_location != TensorProto.EXTERNAL or len(table.dims) != 2:
        return False
    axis = next((helper.get_attribute_value(attribute) for attribute in node.attribute), 0)
    rows, width = table.dims
    large = rows >= LEAST_OUTPUTS and width >= LEAST_INPUTS
    return large and axis == 0 and table.data_type == TensorProto.FLOAT and not table.name.endswith(TRANSPOSED)
