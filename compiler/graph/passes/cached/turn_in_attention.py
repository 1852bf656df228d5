"""Queries and keys turned to their rotary positions by attention over a cache itself, from a table of all positions.

``GroupQueryAttention`` does with ``do_rotary`` what ``RotaryEmbedding`` does before it, by rows of ``cos_cache`` and
``sin_cache`` that ``position_ids`` name. The positions are given in every layer: those of a window have other places in
its buffer than in the text.

Requires: shapes known. Ensures: the same function; what the operator does not take, or whose table would be larger than
it is worth, is left. Nodes left unused stay for the caller's dead-code removal.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from .....bundle.entries.generation_entry import POSITIONS
from ..dims_by_operator import CACHED_ATTENTION
from ..extents import extents
from .angle_tables import angle_tables
from .turned_heads import TurnedHeads, heads_by_token, turned_heads

# Inputs of the operator, and how many it has without a bias.
_QUERY, _KEY, _COSINES, _SINES, _POSITIONS = 0, 1, 7, 8, 9
_INPUTS = 10
# Of a head's size, and of the numbers of it that are turned.
_SIZE_MULTIPLE = 16
# All tables of an engine together take as many bytes at most, or this part of the model's weights.
_LEAST_BYTES, _PART_OF_WEIGHTS = 16 << 20, 0.01


def turn_in_attention(model: ir.Model, count: int, weights: Collection[str]) -> bool:
    """Rewrites every attention over a cache that it can, of a model of ``count`` positions."""
    positions = next((value for value in model.graph.inputs if value.name == POSITIONS), None)
    tables = None if positions is None else _Tables(model, positions, count, weights)
    turned = [tables is not None and _turn(node, tables) for node in list(model.graph)]
    return any(turned)


class _Tables:
    """Cosines and sines ``[count, R / 2]`` for rotary positions of the graph, made once for each kind of them."""

    def __init__(self, model: ir.Model, positions: ir.Value, count: int, weights: Collection[str]) -> None:
        self.positions = positions
        self._model, self._count, self._weights = model, count, weights
        held = [value.const_value for name, value in model.graph.initializers.items() if name in weights]
        total = sum(tensor.nbytes for tensor in held if tensor is not None)
        self._room = max(_LEAST_BYTES, int(_PART_OF_WEIGHTS * total))
        self._known: dict[tuple[ir.Value, ir.Value, bool], list[ir.Value] | None] = {}

    def of(self, found: TurnedHeads) -> list[ir.Value] | None:
        """The two of what turns ``found``, or None where there are none."""
        key = found.cos, found.sin, found.is_signed
        if key not in self._known:
            self._known[key] = self._made(found)
        return self._known[key]

    def _made(self, found: TurnedHeads) -> list[ir.Value] | None:
        half = found.turned // 2
        size = 2 * 4 * self._count * half
        if size > self._room:
            return None
        values = (found.cos, found.sin)
        numbers = angle_tables(self._model, values, self.positions, self._count, self._weights)
        if numbers is None:
            return None
        cos, sin = numbers
        first = -sin[:, :half] if found.is_signed else sin[:, :half]
        if not np.array_equal(cos[:, :half], cos[:, half:]) or not np.array_equal(first, sin[:, half:]):
            return None  # the operator turns both numbers of a pair by one angle
        self._room -= size
        return [self._initializer(np.ascontiguousarray(array[:, half:])) for array in (cos, sin)]

    def _initializer(self, array: np.ndarray) -> ir.Value:
        graph = self._model.graph
        value = ir.val(f"\0angles{len(graph.initializers)}", const_value=ir.tensor(array))
        graph.register_initializer(value)
        return value


def _turn(attention: ir.Node, tables: _Tables) -> bool:
    queries = turned_heads(attention, _QUERY) if attention.op_type == CACHED_ATTENTION else None
    if queries is None or not _takes(attention, queries) or queries.dims[:2] != extents(tables.positions):
        return False
    keys, new = turned_heads(attention, _KEY), extents(attention.inputs[_KEY])
    is_reading = new is not None and len(new) == 3 and new[1] == 0  # keys of an earlier layer, turned by that one
    if not is_reading and (keys is None or keys[3:] != queries[3:]):
        return False
    angles = tables.of(queries)
    if angles is None:
        return False
    attention.replace_input_with(_QUERY, _unturned(queries))
    if keys is not None:
        attention.replace_input_with(_KEY, _unturned(keys))
    if len(attention.inputs) < _INPUTS:
        attention.resize_inputs(_INPUTS)
    for index, value in zip((_COSINES, _SINES, _POSITIONS), (*angles, tables.positions), strict=True):
        attention.replace_input_with(index, value)
    attention.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
    return True


def _takes(attention: ir.Node, queries: TurnedHeads) -> bool:
    """Whether the operator turns heads of this size, and so many numbers of them.

    A window of one token is left: all rows may then be at the first place of their buffers, and there the operator
    takes the position of the first row for all.
    """
    size = queries.dims[3]
    fits = isinstance(size, int) and size % _SIZE_MULTIPLE == 0 and queries.turned % _SIZE_MULTIPLE == 0
    return fits and attention.attributes.get_int("local_window_size", -1) != 1


def _unturned(found: TurnedHeads) -> ir.Value:
    """``[B, S, heads * D]`` as it is before it is turned, for attention and what takes no tokens of it."""
    flat = ir.node("Reshape", [heads_by_token(found), found.flat.inputs[1]])
    before, after = flat.outputs[0], found.flat.outputs[0]
    before.shape, before.type = after.shape, after.type
    found.flat.prepend(flat)
    for use in list(after.uses()):
        made = extents(use.node.outputs[0])
        if use.node.op_type == "Slice" and made is not None and len(made) == 3 and made[1] == 0:
            use.node.replace_input_with(use.idx, before)
    return before
