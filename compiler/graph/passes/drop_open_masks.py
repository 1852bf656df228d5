"""Attention masks that let everything through, gone.

Some models make a mask whatever their inputs are: transformers' vision encoders compute ``position >= 0`` and add
``Where(that, 0, lowest)`` to the scores of every layer. Where the condition is constant and true throughout, the sum is
its other side, and a pass over the scores is saved.

Requires: static shapes. Ensures: the same function. Nodes left unused stay for the caller's dead-code removal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

# What conditions on positions are made of.
_FOLDABLE_OPERATORS = frozenset(
    [
        "Add",
        "And",
        "Cast",
        "Equal",
        "Expand",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "Less",
        "LessOrEqual",
        "Not",
        "Or",
        "Range",
        "Reshape",
        "Sub",
        "Transpose",
        "Unsqueeze",
    ]
)


def drop_open_masks(model: ir.Model) -> bool:
    """Replaces every ``Add`` of such a mask by what the mask is added to."""
    opsets = dict(model.opset_imports)
    judged: dict[ir.Value, bool] = {}  # layers share their mask
    scored: dict[ir.Node, int] = {}  # the input of each such Add that is not its mask
    for node in model.graph:
        if node.op_type != "Add" or node.outputs[0].is_graph_output():
            continue
        for place, (scores, mask) in enumerate((node.inputs, reversed(node.inputs))):
            if mask is None or scores is None or scores.shape is None or scores.shape != node.outputs[0].shape:
                continue
            if mask not in judged:
                judged[mask] = _is_open(mask, opsets)
            if judged[mask]:
                scored[node] = place
    for node, place in scored.items():
        scores = node.inputs[place]  # now: it may be the output of an Add that was replaced
        assert scores is not None
        ir.convenience.replace_all_uses_with(node.outputs[0], scores)
    return bool(scored)


def _is_open(mask: ir.Value, opsets: dict[str, int]) -> bool:
    choice = mask.producer()
    if choice is None or choice.op_type != "Where":
        return False
    condition, kept = choice.inputs[:2]
    zero = ir.convenience.get_const_tensor(kept) if kept is not None else None
    if zero is None or zero.numpy().any():
        return False
    value = _constant(condition, opsets)
    return value is not None and bool(value.all())


def _constant(value: ir.Value | None, opsets: dict[str, int]) -> np.ndarray | None:
    """The numbers that ``value`` holds whatever the model's inputs are, or None where they decide it."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is not None:
        return tensor.numpy()
    node = value.producer() if value is not None else None
    if node is None or node.op_type not in _FOLDABLE_OPERATORS:
        return None
    inputs = {str(place): _constant(given, opsets) for place, given in enumerate(node.inputs)}
    if any(array is None for array in inputs.values()):
        return None
    alone = ir.to_proto(node)
    alone.input[:] = list(inputs)  # values that passes made have no names yet
    results: Any = ReferenceEvaluator(alone, opsets=opsets).run(None, inputs)
    return np.asarray(results[0])
