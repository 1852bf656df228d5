"""Attention over a cache in operators of the standard: scatters into the cache, and attention operation by operation.

ONNX Runtime's ``GroupQueryAttention`` writes new keys and values and reads what is valid. TensorRT's parser takes, from
10.15 on, ``TensorScatter`` into a cache that is an input of the graph. The standard's ``Attention`` is of no use over
all places of it: the parser passes over ``softcap``, and ONNX Runtime's kernel for CUDA answered otherwise than the
processor's where a window hides the first places (docs/gpu.md). A bias by distance is computed of all places.

Requires: static capacities. Ensures: the same function of what is valid; what is left unused is removed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ...bundle.entries.generation_entry import CAPACITY, WINDOW
from ...errors import BuildError
from ..graph.edit import Edit
from ..graph.passes.operators import CACHED_ATTENTION

# The first that has both operators.
_OPSET = 24
# Inputs of the operator: the place of the last token, how many tokens there are in all, and what is added to scores.
_LAST, _TOTAL, _BIAS = 5, 6, 10
_TOKENS_BEFORE_HEADS = (0, 2, 1, 3)
_TURNED = (0, 1, 3, 2)


def scatter_caches(where: str, model: onnx.ModelProto, capacity: int) -> onnx.ModelProto:
    """``model`` for caches of ``capacity`` tokens. Raises BuildError for attention with a soft cap and a bias."""
    edit = _Writing(model)
    totals = {node.input[_TOTAL] for node in edit.source if _bias_of(node)}
    for node in edit.source:
        if node.op_type == CACHED_ATTENTION:
            _lowered(edit, where, node, _shapes(model), capacity)
            continue
        for number, name in enumerate(node.input):
            if name in totals:  # what is computed for every token so far is computed for every place
                node.input[number] = edit.number(capacity, np.int32)
        edit.nodes.append(node)
    made = edit.done()
    _fix_capacity(made, capacity)
    del made.opset_import[:]
    made.opset_import.append(helper.make_opsetid("", _OPSET))
    return made


class _Writing(Edit):
    """The graph as it gets other attention, and masks by what they depend on."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self.places: dict[str, tuple[str, str]] = {}
        self.masks: dict[tuple[str, int], str] = {}
        self.biases: dict[tuple[str, str], str] = {}

    def number(self, value: Any, dtype: type = np.int64) -> str:
        """The name of a constant."""
        return self.constant(np.array(value, dtype))


def _bias_of(node: onnx.NodeProto) -> str:
    """Addends of ``node``'s scores; empty for nothing."""
    has_one = node.op_type == CACHED_ATTENTION and len(node.input) > _BIAS
    return str(node.input[_BIAS]) if has_one else ""


def _lowered(
    edit: _Writing, where: str, node: onnx.NodeProto, shapes: Mapping[str, Sequence[int]], capacity: int
) -> None:
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
            update = _split_heads(edit, new, shared, size)
            edit.add("TensorScatter", [past, update, first], [present], axis=2, mode="linear")
            caches[number] = present
    else:
        size = shapes[_behind(edit, caches[0])][3]
    scale = stated.get("scale") or 1 / math.sqrt(size)
    window = stated.get("local_window_size", -1)
    mask = _mask(edit, node.input[_LAST], tokens, window, capacity)
    split = _split_heads(edit, query, heads, size)
    cap, bias = stated.get("softcap", 0.0), _bias_of(node)
    if bias and cap:
        raise BuildError(f"{where}: attention with a soft cap and a bias by distance; expected one of them")
    scores = _scores(edit, split, caches[0], (heads, shared, size, capacity), scale, cap)
    if bias:
        masked = edit.add("Add", [scores, _added(edit, mask, bias)])
    else:
        lowest = edit.number(np.finfo(np.float32).min, np.float32)
        masked = edit.add("Where", [mask, scores, lowest])
    shares = edit.add("Softmax", [masked], axis=-1)
    joint = edit.add("Reshape", [shares, edit.number([0, shared, -1, capacity])])
    read = edit.add("MatMul", [joint, caches[1]])
    found = edit.add("Reshape", [read, edit.number([0, heads, -1, size])])
    joined = edit.add("Transpose", [found], perm=_TOKENS_BEFORE_HEADS)
    edit.add("Reshape", [joined, edit.number([0, 0, heads * size])], [out])


def _scores(edit: _Writing, query: str, keys: str, sizes: tuple[int, int, int, int], scale: float, cap: float) -> str:
    """``query`` [B, A, S, D] by ``keys`` [B, K, C, D], to [B, A, S, C], of a ``cap`` bent to it.

    Heads that share keys are rows of one product, so that nothing is repeated, and not the cache is turned but the
    queries and the scores, which are few.
    """
    heads, shared, size, capacity = sizes
    scaled = edit.add("Mul", [query, edit.number(scale / (cap or 1), np.float32)])
    grouped = edit.add("Reshape", [scaled, edit.number([0, shared, -1, size])])
    turned = edit.add("Transpose", [grouped], perm=_TURNED)
    by_place = edit.add("MatMul", [keys, turned])
    by_row = edit.add("Transpose", [by_place], perm=_TURNED)
    scores = edit.add("Reshape", [by_row, edit.number([0, heads, -1, capacity])])
    if cap:
        bent = edit.add("Tanh", [scores])
        scores = edit.add("Mul", [bent, edit.number(cap, np.float32)])
    return scores


def _places(edit: _Writing, last: str, query: str) -> tuple[str, str]:
    """The place of the first new token of each row [B], and those of all of them [B, 1, S, 1], int64, by the ``last``
    ones [B]."""
    if last not in edit.places:
        count = edit.add("Shape", [query], start=1, end=2)
        number = edit.add("Squeeze", [count, edit.number([0])])
        steps = edit.add("Range", [edit.number(0), number, edit.number(1)])
        # Not the count itself less 1: a size lies on the processor, and a run that copies it over is no CUDA graph.
        before = edit.add("Gather", [steps, edit.number([-1])])
        whole = edit.add("Cast", [last], to=onnx.TensorProto.INT64)
        first = edit.add("Sub", [whole, before])
        rows = edit.add("Unsqueeze", [first, edit.number([1])])
        tokens = edit.add("Add", [rows, steps])
        edit.places[last] = first, edit.add("Unsqueeze", [tokens, edit.number([1, 3])])
    return edit.places[last]


def _mask(edit: _Writing, last: str, tokens: str, window: int, capacity: int) -> str:
    """Which places each new token sees: those up to its own, of a ``window`` the last ones, bool [B, 1, S, C]."""
    if (last, window) not in edit.masks:
        places = edit.add("Range", [edit.number(0), edit.number(capacity), edit.number(1)])
        seen = edit.add("LessOrEqual", [places, tokens])
        if window > 0:
            distance = edit.add("Sub", [tokens, places])
            near = edit.add("Less", [distance, edit.number(window)])
            seen = edit.add("And", [seen, near])
        edit.masks[last, window] = seen
    return edit.masks[last, window]


def _added(edit: _Writing, mask: str, bias: str) -> str:
    """``bias`` [B, A, S, C] where the boolean ``mask`` [B, 1, S, C] lets a token see a place, the lowest number
    elsewhere, for each pair of them once."""
    if (mask, bias) not in edit.biases:
        lowest = edit.number(np.finfo(np.float32).min, np.float32)
        edit.biases[mask, bias] = edit.add("Where", [mask, bias, lowest])
    return edit.biases[mask, bias]


def _split_heads(edit: _Writing, flat: str, heads: int, size: int) -> str:
    """``[B, S, heads * size]`` as ``[B, heads, S, size]``."""
    split = edit.add("Reshape", [flat, edit.number([0, 0, heads, size])])
    return edit.add("Transpose", [split], perm=_TOKENS_BEFORE_HEADS)


def _behind(edit: _Writing, present: str) -> str:
    """The cache that was scattered into to make ``present``."""
    return next(str(node.input[0]) for node in edit.nodes if present in node.output)


def _fix_capacity(model: onnx.ModelProto, capacity: int) -> None:
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in (CAPACITY, WINDOW):
                dim.dim_value = capacity


def _shapes(model: onnx.ModelProto) -> dict[str, Sequence[int]]:
    return {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
