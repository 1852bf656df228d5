"""The heads of attention over a cache, which are attributes of its operator; their size it reads off its inputs.

What else of a submodel does not follow from the extents of its weights is the graph's own inputs and outputs: caches,
and what is read of a prompt. These numbers an emission sets.

Requires: what ``free_elastic_dims`` does. Ensures: nothing is changed; raises SliceError where neither heads nor their
size are what shrinks, where the size shrinks of heads that attention turns by tables, or where an elastic dimension
cannot be followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import onnx
import onnx_ir as ir

from .....elastic import Submodel
from .....errors import SliceError
from ..dims_by_operator import CACHED_ATTENTION, Dim, Dims, Elastic
from ..free_elastic_dims import Shrinking, followed

# Inputs of the operator.
_QUERY, _KEY, _COSINES, _BIAS = 0, 1, 7, 10
# The dimension of a bias that heads are.
_HEADS = 1


class HeadAxes(NamedTuple):
    """The axes by which the heads of queries, and those of keys and values, shrink; None where they do not."""

    queries: str | None
    keys: str | None


def head_axes(
    model: ir.Model, seeds: Mapping[str, Dim], interface: Mapping[str, Shrinking] = MappingProxyType({})
) -> dict[ir.Value, HeadAxes]:
    """By what each attention over a cache returns, where any of its heads shrink; ``seeds`` and ``interface`` as of
    ``free_elastic_dims``."""
    found: dict[ir.Value, HeadAxes] = {}
    known, _ = followed(model, seeds, interface)
    for node in model.graph:
        if node.op_type == CACHED_ATTENTION:
            axes = HeadAxes(_axis(node, _QUERY, -1, known), _axis(node, _KEY, -1, known))
            if len(node.inputs) > _BIAS and _axis(node, _BIAS, _HEADS, known) != axes.queries:
                raise SliceError(f"node {node.outputs[0].name}: a bias whose heads do not shrink with the queries'")
            if len(node.inputs) > _COSINES and node.inputs[_COSINES] is not None and _size_shrinks(node, known):
                raise SliceError(f"node {node.outputs[0].name}: heads turned by tables, whose size shrinks")
            if axes != (None, None):
                found[node.outputs[0]] = axes
    return found


def set_dims(model: onnx.ModelProto, dims: Mapping[str, Mapping[int, str]], submodel: Submodel) -> None:
    """Gives the graph's inputs and outputs what ``dims`` says of them, by their names: dimensions by axis."""
    for tensor in (*model.graph.input, *model.graph.output):
        for dim, axis in dims.get(tensor.name, {}).items():
            tensor.type.tensor_type.shape.dim[dim].dim_value = submodel[axis]


def set_heads(model: onnx.ModelProto, axes: Mapping[str, HeadAxes], submodel: Submodel) -> None:
    """Gives every attention of ``axes``, by the name of what it returns, the heads of ``submodel``."""
    for node in model.graph.node:
        queries, keys = axes.get(node.output[0], HeadAxes(None, None))
        numbers = {"num_heads": queries, "kv_num_heads": keys}
        for attribute in node.attribute:
            if (axis := numbers.get(attribute.name)) is not None:
                attribute.i = submodel[axis]


def _size_shrinks(node: ir.Node, known: Mapping[ir.Value, Dims]) -> bool:
    """Whether the numbers of a query's head do, which are the faster factor."""
    query = node.inputs[_QUERY]
    return query is not None and query in known and isinstance(known[query][-1][-1], Elastic)


def _axis(node: ir.Node, index: int, dim: int, known: Mapping[ir.Value, Dims]) -> str | None:
    """The axis by which the heads of dimension ``dim`` of an input shrink, which are its slower factor; None where they
    stay, as where their size shrinks."""
    value = node.inputs[index]
    first: Sequence[object] = known[value][dim] if value is not None and value in known else ()
    elastic = [factor for factor in first if isinstance(factor, Elastic)]
    if not elastic or (dim == -1 and elastic == [first[-1]]):
        return None
    if elastic != [first[0]]:
        raise SliceError(f"node {node.outputs[0].name}: what shrinks of input {index} is not its heads")
    return elastic[0].axis.name
