"""Attention over a cache in operators of the standard: scatters into the cache, and attention operation by operation.

ONNX Runtime's ``GroupQueryAttention`` writes new keys and values and reads what is valid. TensorRT's parser takes, from
10.15 on, ``TensorScatter`` into a cache that is an input of the graph. The standard's ``Attention`` is of no use over
all places of it: the parser passes over ``softcap``, and ONNX Runtime's kernel for CUDA answered otherwise than the
processor's where a window hides the first places (docs/gpu.md). A bias by distance is computed of all places.

Requires: static capacities. Ensures: the same function of what is valid; what is left unused is removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ...bundle.entries.generation_entry import CAPACITY, WINDOW
from ...errors import BuildError

# By its name here too: where plans are built there is no onnx_ir, which the passes over graphs import.
_CACHED_ATTENTION = "GroupQueryAttention"
# The first that has both operators.
_OPSET = 24
# Inputs of the operator: the place of the last token, how many tokens there are in all, and what is added to scores.
_LAST, _TOTAL, _BIAS = 5, 6, 10
_TOKENS_BEFORE_HEADS = (0, 2, 1, 3)
_TURNED = (0, 1, 3, 2)


def scatter_caches(where: str, model: onnx.ModelProto, capacity: int) -> None:
    """Rewrites ``model`` in place, for caches of ``capacity`` tokens. Raises BuildError for attention with a soft cap
    and a bias."""
    _fix_capacity(model, capacity)
    edit = _Edit()
    totals = {node.input[_TOTAL] for node in model.graph.node if _bias_of(node)}
    for node in model.graph.node:
        if node.op_type == _CACHED_ATTENTION:
            _lowered(edit, where, node, _shapes(model), capacity)
            continue
        for number, name in enumerate(node.input):
            if name in totals:  # what is computed for every token so far is computed for every place
                node.input[number] = edit.constant(capacity, np.int32)
        edit.nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(_used(edit.nodes, {output.name for output in model.graph.output}))
    model.graph.initializer.extend(edit.constants.values())
    _prune_initializers(model)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", _OPSET))


@dataclass
class _Edit:
    """The nodes of the new graph so far, its new constants, and masks by what they depend on."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    masks: dict[tuple[str, int], str] = field(default_factory=dict)
    biases: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Another node; the name of its output."""
        self.nodes.append(helper.make_node(kind, inputs, [output], output, **attributes))
        return output

    def constant(self, value: Any, dtype: type = np.int64) -> str:
        """The name of a constant, each value once."""
        array: np.ndarray = np.array(value, dtype)
        name = f"scatter.{array.dtype}.{'_'.join(map(str, array.reshape(-1).tolist()))}.{array.ndim}"
        self.constants[name] = numpy_helper.from_array(array, name)
        return name


def _bias_of(node: onnx.NodeProto) -> str:
    """Addends of ``node``'s scores; empty for nothing."""
    has_one = node.op_type == _CACHED_ATTENTION and len(node.input) > _BIAS
    return str(node.input[_BIAS]) if has_one else ""


def _lowered(edit: _Edit, where: str, node: onnx.NodeProto, shapes: Mapping[str, Sequence[int]], capacity: int) -> None:
    """The computation of ``node``, under the names of its outputs; without new keys it reads what another one wrote."""
    stated = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    heads, shared, out = stated["num_heads"], stated["kv_num_heads"], node.output[0]
    query, caches = node.input[0], list(node.input[3:5])
    first, tokens = _places(edit, node.input[_LAST], query)
    if len(node.output) > 1 and node.output[1]:
        size = shapes[caches[0]][3]
        for number, (new, past, present) in enumerate(
            zip(node.input[1:3], list(caches), node.output[1:3], strict=True)
        ):
            update = _split_heads(edit, new, shared, size, f"{out}.update{number}")
            edit.add("TensorScatter", [past, update, first], present, axis=2, mode="linear")
            caches[number] = present
    else:
        size = shapes[_behind(edit, caches[0])][3]
    scale = stated.get("scale") or 1 / math.sqrt(size)
    window = stated.get("local_window_size", -1)
    mask = _mask(edit, node.input[_LAST], first, tokens, window, capacity)
    split = _split_heads(edit, query, heads, size, f"{out}.query")
    cap, bias = stated.get("softcap", 0.0), _bias_of(node)
    if bias and cap:
        raise BuildError(f"{where}: attention with a soft cap and a bias by distance; expected one of them")
    scores = _scores(edit, split, caches[0], (heads, shared, size, capacity), scale, cap, out)
    if bias:
        masked = edit.add("Add", [scores, _added(edit, mask, bias)], f"{out}.masked")
    else:
        lowest = edit.constant(np.finfo(np.float32).min, np.float32)
        masked = edit.add("Where", [mask, scores, lowest], f"{out}.masked")
    shares = edit.add("Softmax", [masked], f"{out}.shares", axis=-1)
    joint = edit.add("Reshape", [shares, edit.constant([0, shared, -1, capacity])], f"{out}.joint")
    read = edit.add("MatMul", [joint, caches[1]], f"{out}.read")
    found = edit.add("Reshape", [read, edit.constant([0, heads, -1, size])], f"{out}.heads")
    joined = edit.add("Transpose", [found], f"{out}.tokens", perm=_TOKENS_BEFORE_HEADS)
    edit.add("Reshape", [joined, edit.constant([0, 0, heads * size])], out)


def _scores(
    edit: _Edit, query: str, keys: str, sizes: tuple[int, int, int, int], scale: float, cap: float, out: str
) -> str:
    """``query`` [B, A, S, D] by ``keys`` [B, K, C, D], to [B, A, S, C], of a ``cap`` bent to it.

    Heads that share keys are rows of one product, so that nothing is repeated, and not the cache is turned but the
    queries and the scores, which are few.
    """
    heads, shared, size, capacity = sizes
    scaled = edit.add("Mul", [query, edit.constant(scale / (cap or 1), np.float32)], f"{out}.scaled")
    grouped = edit.add("Reshape", [scaled, edit.constant([0, shared, -1, size])], f"{out}.grouped")
    turned = edit.add("Transpose", [grouped], f"{out}.turned", perm=_TURNED)
    by_place = edit.add("MatMul", [keys, turned], f"{out}.by_place")
    by_row = edit.add("Transpose", [by_place], f"{out}.by_row", perm=_TURNED)
    scores = edit.add("Reshape", [by_row, edit.constant([0, heads, -1, capacity])], f"{out}.scores")
    if cap:
        bent = edit.add("Tanh", [scores], f"{out}.bent")
        scores = edit.add("Mul", [bent, edit.constant(cap, np.float32)], f"{out}.capped")
    return scores


def _places(edit: _Edit, last: str, query: str) -> tuple[str, str]:
    """The place of the first new token of each row [B], and those of all of them [B, 1, S, 1], int64, by the ``last``
    ones [B]."""
    if last not in edit.places:
        count = edit.add("Shape", [query], f"{last}.count", start=1, end=2)
        number = edit.add("Squeeze", [count, edit.constant([0])], f"{last}.number")
        steps = edit.add("Range", [edit.constant(0), number, edit.constant(1)], f"{last}.steps")
        # Not the count itself less 1: a size lies on the processor, and a run that copies it over is no CUDA graph.
        before = edit.add("Gather", [steps, edit.constant([-1])], f"{last}.before")
        whole = edit.add("Cast", [last], f"{last}.whole", to=onnx.TensorProto.INT64)
        first = edit.add("Sub", [whole, before], f"{last}.first")
        rows = edit.add("Unsqueeze", [first, edit.constant([1])], f"{last}.rows")
        tokens = edit.add("Add", [rows, steps], f"{last}.tokens")
        edit.places[last] = first, edit.add("Unsqueeze", [tokens, edit.constant([1, 3])], f"{last}.places")
    return edit.places[last]


def _mask(edit: _Edit, last: str, first: str, tokens: str, window: int, capacity: int) -> str:
    """Which places each new token sees: those up to its own, of a ``window`` the last ones, bool [B, 1, S, C]."""
    if (last, window) not in edit.masks:
        name = f"{first}.seen{window}"
        places = edit.add("Range", [edit.constant(0), edit.constant(capacity), edit.constant(1)], f"{name}.places")
        seen = edit.add("LessOrEqual", [places, tokens], f"{name}.before")
        if window > 0:
            distance = edit.add("Sub", [tokens, places], f"{name}.distance")
            near = edit.add("Less", [distance, edit.constant(window)], f"{name}.near")
            seen = edit.add("And", [seen, near], f"{name}.both")
        edit.masks[last, window] = seen
    return edit.masks[last, window]


def _added(edit: _Edit, mask: str, bias: str) -> str:
    """``bias`` [B, A, S, C] where the boolean ``mask`` [B, 1, S, C] lets a token see a place, the lowest number
    elsewhere, for each pair of them once."""
    if (mask, bias) not in edit.biases:
        lowest = edit.constant(np.finfo(np.float32).min, np.float32)
        edit.biases[mask, bias] = edit.add("Where", [mask, bias, lowest], f"{bias}.seen.{mask}")
    return edit.biases[mask, bias]


def _split_heads(edit: _Edit, flat: str, heads: int, size: int, name: str) -> str:
    """``[B, S, heads * size]`` as ``[B, heads, S, size]``."""
    split = edit.add("Reshape", [flat, edit.constant([0, 0, heads, size])], f"{name}.split")
    return edit.add("Transpose", [split], name, perm=_TOKENS_BEFORE_HEADS)


def _behind(edit: _Edit, present: str) -> str:
    """The cache that was scattered into to make ``present``."""
    return next(str(node.input[0]) for node in edit.nodes if present in node.output)


def _fix_capacity(model: onnx.ModelProto, capacity: int) -> None:
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in (CAPACITY, WINDOW):
                dim.dim_value = capacity


def _shapes(model: onnx.ModelProto) -> dict[str, Sequence[int]]:
    return {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}


def _used(nodes: Sequence[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
    """Those that something depends on, in their order."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed & set(node.output):
            needed |= set(node.input)
            kept.append(node)
    return kept[::-1]


def _prune_initializers(model: onnx.ModelProto) -> None:
    read = {name for node in model.graph.node for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
