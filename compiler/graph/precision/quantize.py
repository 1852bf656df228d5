"""Quantised products: as TensorRT takes them, and by the kernels that ONNX Runtime has for a processor.

A product of ``x [rows, in]`` and a weight becomes ``Gemm(DQ(Q(x)), DQ(W.int8))`` by standard operators, QuantizeLinear
and DequantizeLinear, as TensorRT takes it. Both are symmetric with zero point 0: ``x`` has one scale, which calibration
found, the weight one for each output. Biases and all else stay float32. No constant repeats an extent of a weight, so
that a submodel differs in extents alone; every value that the graph had still has its name.

ONNX Runtime's own rewriting is off in an engine, so for a processor the kernels themselves are written. Its integer
product is fast for uint8 activations and int8 weights alone (signed activations are 10 to 30 times slower), so int8
activations with zero point 0 become uint8 ones with zero point 128: the same integers, and exactly the same sums.
Biases are added in float32: as int32 inside the product they would depend on the calibrated scale, a tensor for every
bias and scale, and were not measurably faster. Zero points of the weights are stored, since the kernel wants as many as
there are scales.

A scale that is found at run time is that of one row (a token), so that no row changes another: the kernel takes one
scale and one zero point of all activations, so rows are divided by their largest magnitudes, rounded around 128, and
the sums multiplied by these (docs/decisions/0047).

Integer products give the same numbers packed and from mapped weights. ``MatMulNBits`` does not: packed it multiplies
integers, mapped it decodes the whole weight in every run and multiplies in float32, which takes longer than float32.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import onnx
from onnx import TensorProto, helper

from ....profiles.precision import (
    BLOCK_INPUTS,
    FOUR_BITS,
    INT4,
    INT8,
    INT8_SCALE,
    INT8_ZERO,
    LEAST_INPUTS,
    LEAST_OUTPUTS,
    SCALES,
    Encoding,
    encoded_shape,
)
from ..edit import Edit, uses
from ..encodings import parts_of, split_encoding
from ..passes.contract import TRANSPOSED, stack_of
from ..passes.operators import MICROSOFT

_GEMM_DEFAULTS = {"transA": 0, "alpha": 1.0, "beta": 1.0}
# Attribute of MatMulNBits: activations are quantised to int8, block by block, so that the sums are integer sums.
_INT8_ACCURACY_LEVEL = 4
_MIDDLE = np.array(128, np.uint8)


@dataclass(frozen=True)
class Product:
    """A Gemm of ``x [rows, inputs]`` and a weight of the store: ``[outputs, inputs]``, or its transpose, ``W.T``."""

    x: str
    weight: str
    bias: str | None
    output: str
    inputs: int
    outputs: int
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's, as it is stored."""
        return (self.inputs, self.outputs) if self.transposed else (self.outputs, self.inputs)


def products(graph: onnx.GraphProto, in_fp32: Collection[str]) -> dict[str, Product]:
    """The Gemms that a precision may change, by output, in the order of the graph, without the ones that make
    ``in_fp32``.

    The weight is an external initializer (a row ``W[e]`` of a stack too) with at least 32 inputs and 16 outputs.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    found = (_product(node, weights) for node in graph.node)
    return {product.output: product for product in found if product is not None and product.output not in in_fp32}


def quantized(proto: onnx.ModelProto, scales: Mapping[str, float], in_fp32: Collection[str]) -> onnx.ModelProto:
    """``proto`` in int8 by QDQ, but for the products that make ``in_fp32``. ``scales`` are what ``calibrate`` returns.

    A value that several products read is quantised once for each scale.
    """
    edit, changed = Edit(proto), products(proto.graph, in_fp32)
    zero = edit.constant(np.array(0, np.int8))
    done: dict[tuple[str, ...], str] = {}
    for node in edit.source:
        product = changed.get(node.output[0])
        if product is None:
            edit.nodes.append(node)
            continue
        scale = _input_scale(edit, product, scales)
        if (product.x, scale) not in done:
            integers = edit.add("QuantizeLinear", [product.x, scale, zero])
            done[product.x, scale] = edit.add("DequantizeLinear", [integers, scale, zero])
        if (product.weight,) not in done:
            weight = edit.encoded(product.weight, INT8, TensorProto.INT8, product.shape)
            weight_scale = edit.encoded(product.weight, INT8_SCALE, TensorProto.FLOAT, [product.outputs])
            axis = 1 if product.transposed else 0
            done[product.weight,] = edit.add("DequantizeLinear", [weight, weight_scale], axis=axis)
        node.input[0], node.input[1] = done[product.x, scale], done[product.weight,]
        edit.nodes.append(node)
    return edit.done()


def static(proto: onnx.ModelProto, scales: Mapping[str, float], in_fp32: Collection[str]) -> onnx.ModelProto:
    """The float32 template ``proto`` in int8 by ``QuantizeLinear`` to uint8 and ``QGemm``; the integers of
    ``quantized``."""
    return _by_kernels(proto, in_fp32, scales=scales)


def dynamic(proto: onnx.ModelProto, in_fp32: Collection[str]) -> onnx.ModelProto:
    """The float32 template ``proto`` as int8-dynamic: each row of activations is scaled at run time, by the largest
    magnitude in it; no calibration is needed."""
    return _by_kernels(proto, in_fp32)


def weight_only(
    proto: onnx.ModelProto, in_fp32: Collection[str], outermost: Collection[str] = (), encoding: Encoding = INT4
) -> onnx.ModelProto:
    """The float32 template ``proto`` in an ``encoding`` of 4 bits: ``MatMulNBits`` where outputs shrink, elsewhere as
    int8-dynamic.

    A weight whose inputs shrink has no blocks that every prefix holds whole; nor has one that is a table too if
    its rows are no such blocks: that is int8 in both places. So are the weights ``outermost``.
    """
    tables = {node.input[0] for node in proto.graph.node if node.op_type == "Gather"}
    blocked = {
        product.output: encoding
        for product in products(proto.graph, in_fp32).values()
        if not product.transposed
        and (product.inputs % BLOCK_INPUTS[encoding] == 0 or product.weight not in tables)
        and stack_of(product.weight)[0] not in outermost
    }
    return _by_kernels(proto, in_fp32, blocked)


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
        elif held := next((table + one for one in FOUR_BITS if table + one in edit.initializers), None):
            _rows_in_blocks(edit, node, held)
        else:
            _rows(edit, node, table)
    return edit.done()


def _rows(edit: Edit, gather: onnx.NodeProto, table: str) -> None:
    """The value that ``gather`` takes, from integers with a scale for each row."""
    (rows, width), ids = edit.initializers[table].dims, gather.input[1]
    integers = edit.encoded(table, INT8, TensorProto.INT8, [rows, width])
    scale = edit.encoded(table, INT8_SCALE, TensorProto.FLOAT, [rows])
    taken = edit.add("Cast", [edit.add("Gather", [integers, ids], axis=0)], to=TensorProto.FLOAT)
    last = edit.constant(np.array([-1], np.int64))
    edit.add("Mul", [taken, edit.add("Unsqueeze", [edit.add("Gather", [scale, ids], axis=0), last])], gather.output)


def _rows_in_blocks(edit: Edit, gather: onnx.NodeProto, held: str) -> None:
    """The value that ``gather`` takes, from the bytes ``held`` ``[rows, blocks, bytes]`` that a product reads.

    ``GatherBlockQuantized`` would be one node, but wants bytes and scales
    of other dimensions than the product, which a view of the store cannot have beside them.
    """
    table, encoding = split_encoding(held)
    ids, width = gather.input[1], edit.initializers[table].dims[1]
    bytes_of, scales = (edit.add("Gather", [one, ids], axis=0) for one in (held, table + SCALES[encoding][0]))
    shape = edit.add("Concat", [edit.add("Shape", [ids]), edit.constant(np.array([width], np.int64))], axis=0)
    edit.add("Reshape", [edit.decoded_int4(bytes_of, scales), shape], gather.output)


def _by_kernels(
    proto: onnx.ModelProto,
    in_fp32: Collection[str],
    blocked: Mapping[str, Encoding] = MappingProxyType({}),
    scales: Mapping[str, float] | None = None,
) -> onnx.ModelProto:
    """Every product but ``in_fp32``: the ones that make ``blocked`` in its 4 bits, the others of integers, by
    ``scales`` of their inputs, else row by row."""
    edit, changed = Edit(proto), products(proto.graph, in_fp32)
    done: dict[tuple[str, str | None], tuple[list[str], str | None]] = {}
    for node in edit.source:
        product = changed.get(node.output[0])
        if product is None:
            edit.nodes.append(node)
        elif product.output in blocked:
            _blocked_product(edit, product, blocked[product.output])
        else:
            scale = None if scales is None else _input_scale(edit, product, scales)
            if (product.x, scale) not in done:
                done[product.x, scale] = _integers(edit, product.x, scale)
            _integer_product(edit, product, *done[product.x, scale])
    return edit.done()


def _input_scale(edit: Edit, product: Product, scales: Mapping[str, float]) -> str:
    """The constant scale of what ``product`` reads: of joined weights the largest, which clips least."""
    return edit.constant(np.array(max(scales[part] for part in parts_of(product.weight)), np.float32))


def _integers(edit: Edit, x: str, scale: str | None) -> tuple[list[str], str | None]:
    """``x [..., in]`` as integers, their scale and their zero point; without a constant ``scale`` in units of each
    row's largest magnitude, which is the second ``[..., 1]``.

    A row of zeros is divided by 0 and becomes any integers: 0 times what they sum to is the product.
    """
    if scale is not None:
        middle = edit.constant(_MIDDLE)
        return [edit.add("QuantizeLinear", [x, scale, middle]), scale, middle], None
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


def _blocked_product(edit: Edit, product: Product, encoding: Encoding) -> None:
    (scales,) = SCALES[encoding]
    weight = edit.encoded(product.weight, encoding, TensorProto.UINT8, encoded_shape(product.shape, encoding))
    scale = edit.encoded(product.weight, scales, TensorProto.FLOAT, encoded_shape(product.shape, scales))
    edit.add(
        "MatMulNBits",
        [product.x, weight, scale, *(["", "", product.bias] if product.bias else [])],
        [product.output],
        MICROSOFT,
        K=product.inputs,
        N=product.outputs,
        bits=4,
        block_size=BLOCK_INPUTS[encoding],
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


def _product(node: onnx.NodeProto, weights: Mapping[str, TensorProto]) -> Product | None:
    weight = weights.get(node.input[1]) if node.op_type == "Gemm" else None
    if weight is None or weight.data_location != TensorProto.EXTERNAL or len(weight.dims) != 2:
        return None
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    transposed = not attributes.get("transB", 0)
    plain = all(attributes.get(name, default) == default for name, default in _GEMM_DEFAULTS.items())
    if weight.data_type != TensorProto.FLOAT or not plain or transposed != weight.name.endswith(TRANSPOSED):
        return None
    bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
    if bias is not None and (bias not in weights or len(weights[bias].dims) != 1):
        return None
    inputs, outputs = weight.dims if transposed else reversed(weight.dims)
    if inputs < LEAST_INPUTS or outputs < LEAST_OUTPUTS:
        return None
    return Product(node.input[0], weight.name, bias, node.output[0], inputs, outputs, transposed)
