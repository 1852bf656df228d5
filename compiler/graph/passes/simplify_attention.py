"""Simpler forms of what the exporter decomposes: scaled-dot-product attention, and tokens picked by number."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .matching import extents, is_permuted, producer, product, replace, scalar, typed_node

_TOKENS = 1


def simplify_attention(model: ir.Model) -> bool:
    """Applies three rules wherever they match. Nodes left unused stay for dead-code removal.

    1. Keys: ``Reshape (fold batch and heads) -> Transpose -> Reshape (unfold)`` is one Transpose, and so is that with a
       Transpose before it.
    2. Scale: ``(q * c) @ (k * c)`` is ``(q * c^2) @ k`` up to the rounding of ``c^2``, one pass over a tensor less.
    3. NaN guard: ``Where(IsNaN(p), 0, p)`` after a Softmax exists for rows whose every score is minus infinity. With a
       finite mask there is no such row, and a NaN that comes from elsewhere should be seen.
    """
    changed = False
    for node in list(model.graph):
        changed |= _transpose_keys(node) or _merge_scales(node) or _drop_nan_guard(node)
    return changed


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


def _transpose_keys(node: ir.Node) -> bool:
    """Rule 1, at the last Reshape."""
    swap = producer(node, 0, "Transpose") if node.op_type == "Reshape" else None
    fold = producer(swap, 0, "Reshape") if swap else None
    source = fold.inputs[0] if fold else None
    if swap is None or fold is None or source is None:
        return False
    start, end = extents(source) or (), extents(node.outputs[0])
    unfolds = len(start) == 4 and end == (*start[:2], start[3], start[2])
    folded = extents(fold.outputs[0]) == (product(start[:2]), *start[2:]) if unfolds else False
    if not folded or not is_permuted(swap, (0, 2, 1)):
        return False
    first = producer(fold, 0, "Transpose")
    if first is None or first.inputs[0] is None:  # keys turned by their positions, say
        _replace(node, ir.node("Transpose", [source], attributes={"perm": [0, 1, 3, 2]}))
        return True
    a, b, c, d = first.attributes.get_ints("perm") or (3, 2, 1, 0)
    _replace(node, ir.node("Transpose", [first.inputs[0]], attributes={"perm": [a, b, d, c]}))
    return True


def _merge_scales(node: ir.Node) -> bool:
    """Rule 2, at the product of queries and keys."""
    queries, keys = (producer(node, side, "Mul") if node.op_type == "MatMul" else None for side in (0, 1))
    if queries is None or keys is None:
        return False
    scales = [scalar(part.inputs[1]) for part in (queries, keys)]
    if scales[0] is None or scales[1] is None or len(queries.outputs[0].uses()) != 1:
        return False
    square = ir.tensor(np.array(scales[0] * scales[1], np.float32))
    constant = typed_node("Constant", [], {"value": square}, [], ir.TensorType(ir.DataType.FLOAT))
    queries.prepend(constant)
    queries.replace_input_with(1, constant.outputs[0])
    node.replace_input_with(1, keys.inputs[0])
    return True


def _drop_nan_guard(node: ir.Node) -> bool:
    """Rule 3, at the Where."""
    test = producer(node, 0, "IsNaN") if node.op_type == "Where" else None
    softmax = producer(node, 2, "Softmax") if test else None
    if test is None or softmax is None or test.inputs[0] is not node.inputs[2] or scalar(node.inputs[1]) != 0:
        return False
    if not _finite_mask(softmax) or node.outputs[0].is_graph_output():
        return False
    ir.convenience.replace_all_uses_with(node.outputs[0], softmax.outputs[0])
    return True


def _finite_mask(softmax: ir.Node) -> bool:
    """Whether what is added to the scores is a choice between finite constants, or nothing is added."""
    add = producer(softmax, 0, "Add")
    if add is None:
        return True
    masks = [mask for mask in (producer(add, side, "Where") for side in (0, 1)) if mask is not None]
    values = [scalar(value) for mask in masks for value in mask.inputs[1:]]
    return bool(values) and all(value is not None and np.isfinite(value) for value in values)


def _replace(old: ir.Node, new: ir.Node) -> None:
    old.prepend(new)
    replace(old.outputs[0], new.outputs[0])
