"""Tables that a graph would make anew at every run: position masks, rotary angles, slot numbers.

The runtime opens engines without ONNX Runtime's optimiser, so what does not depend on an input is computed whenever an
engine runs. What comes out here is an initializer, which the compiler puts into the weight store, where all engines of
a bucket share it. A table that would be larger than both a limit and what it is made of stays computed: reading a mask
of thousands of positions from memory costs what making it does, and every bundle would carry it.

Requires: constants as initializers, weights out of reach (weights_as_inputs.py). Ensures: the same function. Nodes left
unused stay for the caller's dead-code removal.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

# Bytes: the mask of 512 positions.
_MAX_TABLE_BYTES = 1 << 20
# What tables are made with; anything else is left as it is.
_FOLDABLE_OPERATORS = frozenset(
    [
        *("Abs", "Add", "And", "Cast", "Clip", "Concat", "Cos", "CumSum", "Div", "Equal", "Exp", "Expand", "Floor"),
        *("Gather", "GatherND", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "MatMul", "Max"),
        *("Min", "Mod"),
        *("Mul", "Neg", "Not", "Or", "Pow", "Range", "Reciprocal", "Reshape", "Sin", "Slice", "Sqrt", "Squeeze", "Sub"),
        *("Tile", "Transpose", "Unsqueeze", "Where"),
    ]
)


def fold_tables(model: ir.Model) -> bool:
    """Replaces every value that depends on no input by its numbers."""
    graph, opsets = model.graph, dict(model.opset_imports)
    known = {value: value.const_value.numpy() for value in graph.initializers.values() if value.const_value is not None}
    folded: dict[ir.Value, np.ndarray] = {}
    for node in graph:
        if node.domain or node.op_type not in _FOLDABLE_OPERATORS or len(node.outputs) != 1:
            continue
        given = [value for value in node.inputs if value is not None]
        if given and all(value in known for value in given):
            array = _evaluated(node, [known[value] for value in given], opsets)
            if array.nbytes <= max(_MAX_TABLE_BYTES, sum(known[value].nbytes for value in given)):
                known[node.outputs[0]] = folded[node.outputs[0]] = array
    needed = {value: array for value, array in folded.items() if _feeds_the_rest(value, folded)}
    for number, (value, array) in enumerate(needed.items()):
        table = ir.val(f"\0table{number}", const_value=ir.tensor(array))
        ir.convenience.replace_all_uses_with(value, table)
        graph.register_initializer(table)
    return bool(needed)


def _feeds_the_rest(value: ir.Value, folded: Collection[ir.Value]) -> bool:
    """Whether a node that stays takes ``value``; an output of the model is not replaced."""
    return not value.is_graph_output() and any(
        output not in folded for use in value.uses() for output in use.node.outputs
    )


def _evaluated(node: ir.Node, inputs: list[np.ndarray], opsets: dict[str, int]) -> np.ndarray:
    alone = ir.to_proto(node)
    places = iter(range(len(inputs)))
    alone.input[:] = ["" if value is None else str(next(places)) for value in node.inputs]
    alone.output[:] = ["made"]
    results: Any = ReferenceEvaluator(alone, opsets=opsets).run(
        None, {str(place): array for place, array in enumerate(inputs)}
    )
    return np.asarray(results[0])
