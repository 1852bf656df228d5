"""Parts of a tensor taken in a simpler form than the exporter's.

Nodes that take apart what was joined read the parts: parts of a fused layer, which are products of their own,
meet in a Concat because the model's class takes them from one value. Tokens picked by number are one Gather.
"""

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .matching import (
    Extent,
    extents,
    is_last,
    is_permuted,
    producer,
    product,
    replace,
    reshape_target,
    scalar,
    typed_node,
)

_TOKENS = 1


def take_parts(model: ir.Model) -> bool:
    """Applies two rules wherever they match. The nodes left unused are removed: what joins elastic values must not be
    there when their dimensions are followed.

    1. A Split of a Concat along the last dimension into the very parts.
    2. A Slice of one step, where a Reshape gave the parts of such a Concat a dimension of their own.
    """
    changed = sum(_split(node) or _step(model.graph, node) for node in model.graph)
    return bool(changed and RemoveUnusedNodesPass()(model))


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


def _split(node: ir.Node) -> bool:
    """Rule 1."""
    parts = _joined(producer(node, 0, "Concat")) if node.op_type == "Split" else ()
    are_same = [extents(part) for part in parts] == [extents(output) for output in node.outputs]
    if not parts or not are_same or any(output.is_graph_output() for output in node.outputs):
        return False
    if not is_last(node.attributes.get_int("axis", 0), node.inputs[0]):
        return False
    for output, part in zip(node.outputs, parts, strict=True):
        ir.convenience.replace_all_uses_with(output, part)
    return True


def _step(graph: ir.Graph, node: ir.Node) -> bool:
    """Rule 2."""
    reshape = producer(node, 0, "Reshape") if node.op_type == "Slice" else None
    parts, dims = _joined(producer(reshape, 0, "Concat")), extents(node.inputs[0]) if node.inputs else None
    given = [scalar(value) for value in node.inputs[1:]] if len(node.inputs) > 3 else [None]
    if not parts or dims is None or None in given or node.outputs[0].is_graph_output():
        return False
    begin, end, axis, *_ = (int(number or 0) for number in given)
    at = axis % len(dims)
    own = (*dims[:at], 1, *dims[at + 1 :])
    if dims[at] != len(parts) or end != begin + 1 or not all(_has(part, dims, at) for part in parts):
        return False
    target = reshape_target(graph, own)
    taken = typed_node("Reshape", [parts[begin], target[-1].outputs[0]], {}, own, node.outputs[0].type)
    node.prepend([*target, taken])
    ir.convenience.replace_all_uses_with(node.outputs[0], taken.outputs[0])
    return True


def _joined(concat: ir.Node | None) -> Sequence[ir.Value]:
    """The values that ``concat`` joins along their last dimension."""
    if concat is None or not is_last(concat.attributes.get_int("axis", 0), concat.outputs[0]):
        return ()
    return [value for value in concat.inputs if value is not None]


def _has(part: ir.Value, dims: Sequence[Extent], at: int) -> bool:
    """Whether ``part`` has the dimensions but the one ``at`` which it lies."""
    own = extents(part)
    return own is not None and (product(own[:-1]), own[-1]) == (product(dims[:at]), product(dims[at + 1 :]))
