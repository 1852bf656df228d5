"""Values that a graph would compute anew at every run though no input decides them: tables, and masks that hide
nothing.

The runtime opens engines without ONNX Runtime's optimiser, so what does not depend on an input is computed whenever an
engine runs: position masks, rotary angles, slot numbers. The result is an initializer, which the compiler puts into
the weight store, where all engines of a bucket share it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

# Bytes: the mask of 512 positions.
_MAX_TABLE_BYTES = 1 << 20
# Operators of conditions on positions.
_CONDITION_OPERATORS = frozenset(
    [
        *("Add", "And", "Cast", "Equal", "Expand", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual"),
        *("Not", "Or", "Range", "Reshape", "Sub", "Transpose", "Unsqueeze"),
    ]
)
# Operators of tables; anything else is left as it is.
_TABLE_OPERATORS = _CONDITION_OPERATORS | frozenset(
    [
        *("Abs", "Clip", "Concat", "Cos", "CumSum", "Div", "Exp", "Floor", "Gather", "GatherND", "MatMul", "Max"),
        *("Min", "Mod", "Mul", "Neg", "Pow", "Reciprocal", "Sin", "Slice", "Sqrt", "Squeeze", "Tile", "Where"),
    ]
)


def fold_tables(model: ir.Model) -> bool:
    """Replaces every value that depends on no input by its numbers.

    A table that would be larger than both a limit and what it is made of stays computed: reading a mask of thousands of
    positions from memory costs what making it does, and every bundle would carry it.
    """
    graph, opsets = model.graph, dict(model.opset_imports)
    known = {value: value.const_value.numpy() for value in graph.initializers.values() if value.const_value is not None}
    folded: dict[ir.Value, np.ndarray] = {}
    for node in graph:
        if node.domain or node.op_type not in _TABLE_OPERATORS or len(node.outputs) != 1:
            continue
        given = [value for value in node.inputs if value is not None]
        if given and all(value in known for value in given):
            array = _evaluated(node, [None if value is None else known[value] for value in node.inputs], opsets)
            if array.nbytes <= max(_MAX_TABLE_BYTES, sum(known[value].nbytes for value in given)):
                known[node.outputs[0]] = folded[node.outputs[0]] = array
    needed = {value: array for value, array in folded.items() if _feeds_the_rest(value, folded)}
    for number, (value, array) in enumerate(needed.items()):
        table = ir.val(f"\0table{number}", const_value=ir.tensor(array))
        ir.convenience.replace_all_uses_with(value, table)
        graph.register_initializer(table)
    return bool(needed)


def drop_open_masks(model: ir.Model) -> bool:
    """Replaces every ``Add`` of an attention mask that lets everything through by what the mask is added to.

    Some models make a mask whatever their inputs are: transformers' vision encoders compute ``position >= 0`` and add
    ``Where(that, 0, lowest)`` to the scores of every layer.
    """
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


def _feeds_the_rest(value: ir.Value, folded: Collection[ir.Value]) -> bool:
    """Whether a node that stays takes ``value``; an output of the model is not replaced."""
    return not value.is_graph_output() and any(
        output not in folded for use in value.uses() for output in use.node.outputs
    )


def _is_open(mask: ir.Value, opsets: Mapping[str, int]) -> bool:
    choice = mask.producer()
    if choice is None or choice.op_type != "Where":
        return False
    condition, kept = (_numbers(value, opsets) for value in choice.inputs[:2])
    return condition is not None and kept is not None and not kept.any() and bool(condition.all())


def _numbers(value: ir.Value | None, opsets: Mapping[str, int]) -> np.ndarray | None:
    """The numbers that ``value`` holds whatever the model's inputs are, or None where they decide it."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is not None:
        return tensor.numpy()
    node = value.producer() if value is not None else None
    if node is None or node.op_type not in _CONDITION_OPERATORS:
        return None
    inputs = [_numbers(given, opsets) for given in node.inputs]
    return None if any(array is None for array in inputs) else _evaluated(node, inputs, opsets)


def _evaluated(node: ir.Node, inputs: Sequence[np.ndarray | None], opsets: Mapping[str, int]) -> np.ndarray:
    """Outputs of ``node`` for ``inputs``, None for one that it does without."""
    alone = ir.to_proto(node)  # values that passes made have no names yet
    alone.input[:] = ["" if array is None else str(place) for place, array in enumerate(inputs)]
    alone.output[:] = ["made"]
    given = {str(place): array for place, array in enumerate(inputs) if array is not None}
    results: Any = ReferenceEvaluator(alone, opsets=dict(opsets)).run(None, given)
    return np.asarray(results[0])
