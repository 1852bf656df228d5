"""Operators of ONNX Runtime's own in place of the nodes that they compute the same as.

1. ``w * (x * (1 / sqrt(mean(x ** 2) + e)))`` over the last dimension is ``SimplifiedLayerNormalization``.
2. That of a sum ``a + b`` is ``SkipSimplifiedLayerNormalization``, which gives the sum too.
3. ``x * sigmoid(x)`` is ``QuickGelu``.

Requires: shapes known. Ensures: the same function; a value that was replaced has its name. Nodes left unused stay for
the caller's dead-code removal. The graph runs in ONNX Runtime alone.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from ..extents import extents
from ..matching import producer, replace, scalar

_MICROSOFT = "com.microsoft"
_NORM = "SimplifiedLayerNormalization"


def fuse_norms(model: ir.Model) -> bool:
    """Applies the three rules wherever they match."""
    changed = False
    for node in list(model.graph):
        changed |= _fuse_norm(node) or _fuse_silu(node)
    for node in list(model.graph):
        changed |= _add_before_norm(node)
    model.graph.sort()  # a weight may be made behind the sum whose norm it scales
    return changed


class _Norm(NamedTuple):
    x: ir.Value
    weight: ir.Value
    epsilon: float


def _fuse_norm(node: ir.Node) -> bool:
    """Rule 1, at the product with the weight."""
    found = next((norm for side in (0, 1) if (norm := _norm(node, side)) is not None), None)
    if found is None:
        return False
    attributes = {"axis": -1, "epsilon": found.epsilon, "stash_type": 1}
    fused = ir.node(_NORM, [found.x, found.weight], attributes=attributes)
    node.prepend(fused)
    replace(node.outputs[0], fused.outputs[0])
    return True


def _norm(node: ir.Node, side: int) -> _Norm | None:
    """The norm whose last product is ``node``, with the normalised value on ``side``."""
    normalised = producer(node, side, "Mul") if node.op_type == "Mul" else None
    if normalised is None:
        return None
    for inverse in (0, 1):
        root = producer(producer(normalised, inverse, "Reciprocal"), 0, "Sqrt")
        total = producer(root, 0, "Add")
        mean, epsilon = producer(total, 0, "ReduceMean"), scalar(total.inputs[1]) if total else None
        power = producer(mean, 0, "Pow")
        x, weight = normalised.inputs[1 - inverse], node.inputs[1 - side]
        dims = extents(x)
        if mean is None or power is None or epsilon is None or x is None or weight is None or dims is None:
            continue
        over = scalar(mean.inputs[1]) if len(mean.inputs) > 1 else None
        is_last = over in (-1, len(dims) - 1) and mean.attributes.get_int("keepdims", 1) == 1
        if is_last and power.inputs[0] is x and scalar(power.inputs[1]) == 2 and extents(weight) == dims[-1:]:
            return _Norm(x, weight, epsilon)
    return None


def _add_before_norm(norm: ir.Node) -> bool:
    """Rule 2, at the norm."""
    add = producer(norm, 0, "Add") if norm.op_type == _NORM else None
    if add is None or add.outputs[0].is_graph_output():
        return False
    dims, total = extents(add.outputs[0]), add.outputs[0]
    if dims is None or len(dims) != 3 or any(extents(part) != dims for part in add.inputs):
        return False
    attributes = {"epsilon": norm.attributes.get_float("epsilon", 1e-5)}
    inputs = [*add.inputs, norm.inputs[1]]
    fused = ir.node("SkipSimplifiedLayerNormalization", inputs, attributes, domain=_MICROSOFT, num_outputs=4)
    add.prepend(fused)  # before all that reads the sum
    replace(norm.outputs[0], fused.outputs[0])
    replace(total, fused.outputs[3])
    return True


def _fuse_silu(node: ir.Node) -> bool:
    """Rule 3, at the product."""
    for side in (0, 1):
        sigmoid = producer(node, side, "Sigmoid") if node.op_type == "Mul" else None
        if sigmoid is not None and sigmoid.inputs[0] is node.inputs[1 - side]:
            fused = ir.node("QuickGelu", [sigmoid.inputs[0]], {"alpha": 1.0}, domain=_MICROSOFT)
            node.prepend(fused)
            replace(node.outputs[0], fused.outputs[0])
            return True
    return False
