"""Products of one value as one product, over weights that lie side by side: a step of one token has fewer nodes.

Queries, keys and values are three products of the same tokens. Of one token each is short, and what a product costs
beside its arithmetic is paid three times. Rows of a weight ``[out, in]`` are outputs, so that weights one behind the
other are one weight, whose outputs a Split takes apart.

Requires: linear layers as Gemm; a value that several products read is one value. Ensures: the same function; a joined
weight, or bias, is called by its parts, ``a+b+c``. Parts that something else reads too are left, and so are those of so
few outputs that integers never take their place: joined they would get an encoding that they have nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .....profiles.precision import LEAST_OUTPUTS
from ..extents import extents, shape_of
from ..matching import replace

# No parameter has it in its name, which is made of names of Python.
_BETWEEN = "+"


@dataclass(frozen=True)
class Joined:
    """Names of the joined initializers; and ``values`` of the graph that are gone, to what is in their place."""

    names: frozenset[str]
    values: Mapping[ir.Value, ir.Value]


def join_products(model: ir.Model, parameters: Collection[str]) -> Joined:
    """Joins the products of each value by ``parameters``, those with a bias and those without."""
    graph = model.graph
    products: dict[tuple[ir.Value, int], list[ir.Node]] = {}
    for node in graph:
        if _is_product(node, parameters) and node.inputs[0] is not None:
            products.setdefault((node.inputs[0], len(node.inputs)), []).append(node)
    names: set[str] = set()
    values: dict[ir.Value, ir.Value] = {}
    for (x, inputs), nodes in products.items():
        if len(nodes) > 1:
            made = [_side_by_side(graph, [_initializer(node, index) for node in nodes]) for index in range(1, inputs)]
            names.update(value.name or "" for value in made)
            values |= _replaced(graph, nodes, [x, *made])
    return Joined(frozenset(names), values)


def joined_parts(name: str) -> tuple[str, ...]:
    """The parameters whose rows lie one behind the other in the tensor ``name``; of most itself alone."""
    return tuple(name.split(_BETWEEN))


def _is_product(node: ir.Node, parameters: Collection[str]) -> bool:
    """Whether ``node`` is ``x W' + b``, or that without ``b``, of parameters that nothing else reads."""
    factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    turned = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
    if node.op_type != "Gemm" or factors != [1.0, 1.0] or turned != [0, 1] or node.outputs[0].is_graph_output():
        return False
    is_own = all(
        value is not None and value.is_initializer() and value.name in parameters and len(value.uses()) == 1
        for value in node.inputs[1:]
    )
    return is_own and _rows(_initializer(node, 1)) >= LEAST_OUTPUTS


def _initializer(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _side_by_side(graph: ir.Graph, parts: list[ir.Value]) -> ir.Value:
    """A new initializer of the rows of all ``parts``; its bytes are made when the weight store is written."""
    tensors = [part.const_value for part in parts if part.const_value is not None]
    shape = ir.Shape([sum(map(_rows, parts)), *tensors[0].shape.numpy()[1:]])
    name = _BETWEEN.join(part.name or "" for part in parts)
    lazy = ir.LazyTensor(
        lambda: ir.Tensor(np.concatenate([tensor.numpy() for tensor in tensors]), name=name),
        dtype=tensors[0].dtype,
        shape=shape,
        name=name,
    )
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(lazy.dtype), const_value=lazy)
    graph.register_initializer(value)
    return value


def _replaced(graph: ir.Graph, nodes: list[ir.Node], inputs: list[ir.Value]) -> dict[ir.Value, ir.Value]:
    """Puts one product of ``inputs`` in the place of ``nodes``, where the first of them is; returns what the Split
    behind it has for what they returned."""
    weights = [_initializer(node, 1) for node in nodes]
    product = ir.node("Gemm", inputs, {"transB": 1})
    rows = ir.Value(name=f"{inputs[1].name}.rows", const_value=ir.tensor(np.array(list(map(_rows, weights)), np.int64)))
    graph.register_initializer(rows)
    split = ir.node("Split", [product.outputs[0], rows], {"axis": -1}, num_outputs=len(nodes))
    whole, first = product.outputs[0], nodes[0].outputs[0]
    dims = extents(first)
    assert dims is not None
    whole.shape, whole.type = shape_of([dims[0], sum(map(_rows, weights))]), first.type
    nodes[0].prepend([product, split])
    values = {}
    for node, part in zip(nodes, split.outputs, strict=True):
        values[node.outputs[0]] = part
        replace(node.outputs[0], part)
    unread = [_initializer(node, index) for node in nodes for index in range(1, len(inputs))]
    graph.remove(nodes, safe=True)
    for value in unread:
        del graph.initializers[value.name or ""]
    return values


def _rows(weight: ir.Value) -> int:
    tensor = weight.const_value
    assert tensor is not None
    return int(tensor.shape.numpy()[0])
