"""int8 by standard operators: QuantizeLinear and DequantizeLinear around every linear layer, as TensorRT takes it.

A product of ``x [rows, in]`` and a weight becomes ``Gemm(DQ(Q(x)), DQ(W.int8))``. Both are symmetric with zero point 0:
``x`` has one scale, which calibration found, the weight one for each output. Biases and all else stay float32.

Requires: initializers named after parameters and external where the store holds them. Ensures: every value that the
graph had still has its name; no constant repeats an extent of a weight, so that a submodel differs in extents alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from ....profiles.precision import INT8, INT8_SCALE, LEAST_INPUTS, LEAST_OUTPUTS
from ..encodings import parts_of
from ..passes.linear_to_gemm import TRANSPOSED
from .edit import Edit


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


def products(graph: onnx.GraphProto, kept: Collection[str]) -> dict[str, Product]:
    """The Gemms that a precision may change, by output, in the order of the graph, without the ones that make ``kept``.

    The weight is an external initializer (a row ``W[e]`` of a stack too) with at least 32 inputs and 16 outputs.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    found = (_product(node, weights) for node in graph.node)
    return {product.output: product for product in found if product is not None and product.output not in kept}


def quantized(proto: onnx.ModelProto, scales: Mapping[str, float], kept: Collection[str]) -> onnx.ModelProto:
    """``proto`` in int8 by QDQ, but for the products that make ``kept``. ``scales`` are what ``calibrate`` returns.

    A product of joined weights takes the largest scale of theirs, which clips least. A value that several products read
    is quantised once for each scale.
    """
    edit, changed = Edit(proto), products(proto.graph, kept)
    zero = edit.constant(np.array(0, np.int8))
    done: dict[tuple[str, ...], str] = {}
    for node in edit.source:
        product = changed.get(node.output[0])
        if product is None:
            edit.nodes.append(node)
            continue
        scale = edit.constant(np.array(max(scales[part] for part in parts_of(product.weight)), np.float32))
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


_GEMM_DEFAULTS = {"transA": 0, "alpha": 1.0, "beta": 1.0}
