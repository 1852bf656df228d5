"""Tokens picked out of every row by their numbers as one Gather, where the exporter writes four nodes.

``x[:, numbers]`` of ``[B, S, H]`` comes as tokens put in front, a GatherND by ``[[n], ...]``, and rows put in front
again.

Requires: shapes known. Ensures: the same function. Nodes left unused stay for the caller's dead-code removal.
"""

from __future__ import annotations

import onnx_ir as ir

from ..extents import extents
from ..matching import producer, replace, scalar

_TOKENS = 1


def pick_tokens(model: ir.Model) -> bool:
    """Rewrites every such pick."""
    changed = False
    for node in list(model.graph):
        picked = producer(node, 0, "GatherND") if _swaps_rows_and_tokens(node) else None
        in_front, numbers = producer(picked, 0, "Transpose"), producer(picked, 1, "Unsqueeze")
        if picked is None or in_front is None or numbers is None or not _swaps_rows_and_tokens(in_front):
            continue
        places = extents(numbers.inputs[0])
        if picked.attributes.get_int("batch_dims", 0) or places is None or len(places) != 1:
            continue
        if scalar(numbers.inputs[1]) not in (-1, 1):
            continue
        gather = ir.node("Gather", [in_front.inputs[0], numbers.inputs[0]], {"axis": _TOKENS})
        node.prepend(gather)
        replace(node.outputs[0], gather.outputs[0])
        changed = True
    return changed


def _swaps_rows_and_tokens(node: ir.Node) -> bool:
    permutation = node.attributes.get_ints("perm") if node.op_type == "Transpose" else None
    return permutation is not None and tuple(permutation) == (1, 0, 2)
