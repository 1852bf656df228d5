"""Tokens picked by number, in a simpler form than the exporter's."""

from __future__ import annotations

import onnx_ir as ir

from .matching import extents, is_permuted, producer, replace, scalar

_TOKENS = 1


def pick_tokens(model: ir.Model) -> bool:
    """One Gather for ``x[:, numbers]`` of ``[B, S, H]``, which comes as tokens put in front, a GatherND by
    ``[[n], ...]``, and rows put in front again."""
    changed = False
    for node in list(model.graph):
        picked = producer(node, 0, "GatherND") if is_permuted(node, (1, 0, 2)) else None
        in_front, numbers = producer(picked, 0, "Transpose"), producer(picked, 1, "Unsqueeze")
        if picked is None or in_front is None or numbers is None or not is_permuted(in_front, (1, 0, 2)):
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
