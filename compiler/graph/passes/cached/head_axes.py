"""The heads of attention over a cache, which are attributes of its operator and a dimension of the graph's own inputs.

Everything else of a submodel follows from the extents of its weights; these numbers an emission sets.

Requires: what ``free_elastic_dims`` does. Ensures: nothing is changed; raises SliceError where heads are not what
shrinks, or an elastic dimension cannot be followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import onnx
import onnx_ir as ir

from .....elastic import Submodel
from .....errors import SliceError
from ..dims_by_operator import CACHED_ATTENTION, Dim, Dims, Elastic
from ..free_elastic_dims import followed

# Inputs of the operator.
_QUERY, _KEY, _BIAS = 0, 1, 10
# A cache is ``[B, heads, capacity, size]``.
_HEADS = 1


class HeadAxes(NamedTuple):
    """The axes by which the heads of queries, and those of keys and values, shrink; None where they do not."""

    queries: str | None
    keys: str | None


def head_axes(model: ir.Model, seeds: Mapping[str, Dim]) -> dict[ir.Value, HeadAxes]:
    """By what each attention over a cache returns, where any of its heads shrink; ``seeds`` as of
    ``free_elastic_dims``."""
    found: dict[ir.Value, HeadAxes] = {}
    known, _ = followed(model, seeds)
    for node in model.graph:
        if node.op_type == CACHED_ATTENTION:
            axes = HeadAxes(_axis(node, _QUERY, -1, known), _axis(node, _KEY, -1, known))
            if len(node.inputs) > _BIAS and _axis(node, _BIAS, _HEADS, known) != axes.queries:
                raise SliceError(f"node {node.outputs[0].name}: a bias whose heads do not shrink with the queries'")
            if axes != (None, None):
                found[node.outputs[0]] = axes
    return found


def set_heads(model: onnx.ModelProto, axes: Mapping[str, HeadAxes], submodel: Submodel) -> None:
    """Gives every attention of ``axes``, by the name of what it returns, the heads of ``submodel``, and the graph the
    caches of so many."""
    tensors = {tensor.name: tensor for tensor in (*model.graph.input, *model.graph.output)}
    for node in model.graph.node:
        queries, keys = axes.get(node.output[0], HeadAxes(None, None))
        numbers = {"num_heads": queries, "kv_num_heads": keys}
        for attribute in node.attribute:
            if (axis := numbers.get(attribute.name)) is not None:
                attribute.i = submodel[axis]
        if keys is not None:
            for name in (*node.input[3:5], *node.output[1:3]):
                tensors[name].type.tensor_type.shape.dim[_HEADS].dim_value = submodel[keys]


def _axis(node: ir.Node, index: int, dim: int, known: Mapping[ir.Value, Dims]) -> str | None:
    """The axis by which dimension ``dim`` of an input shrinks: its heads, blocks of a size that stays."""
    value = node.inputs[index]
    first: Sequence[object] = known[value][dim] if value is not None and value in known else ()
    elastic = [factor for factor in first if isinstance(factor, Elastic)]
    if not elastic:
        return None
    if elastic != [first[0]]:
        raise SliceError(f"node {node.outputs[0].name}: what shrinks of input {index} is not its heads")
    return elastic[0].axis.name
