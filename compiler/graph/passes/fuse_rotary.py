"""Rotary positions (Su et al. 2021) of queries and keys in KV-cache engines, fused into an operator or into attention.

``x * cos + rotated(x) * sin`` (section 3.4.2, in the order of GPT-NeoX), where ``rotated`` has the second half of the
last dimension, negated, in front of the first; or as it is, and the sines have the signs. All numbers of a head are
turned so, or the first ones alone.

Attention over a cache turns queries and keys itself, by tables of all positions (``rotary_tables.py``); what it does
not take becomes one ``RotaryEmbedding``, by the angles that the model computes; the rest stays as it is.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from ....bundle.entries.generation_entry import POSITIONS
from .matching import (
    Extent,
    extents,
    int64_constant,
    is_last,
    is_permuted,
    last_extent,
    producer,
    product,
    replace,
    scalar,
    sliced,
)
from .operators import CACHED_ATTENTION, MICROSOFT, NORM
from .rotary_tables import AngleTables

_ANGLES = frozenset({"Cos", "Sin"})
# Inputs of attention over a cache, and how many it has without a bias.
_QUERY, _KEY, _COSINES, _SINES, _POSITIONS = 0, 1, 7, 8, 9
_INPUTS = 10
# The size of a head, and of its rotated part, is a multiple of this.
_SIZE_MULTIPLE = 16
_HEADS_TO_FRONT = (0, 2, 1, 3)


def fuse_rotary_into_attention(model: ir.Model, count: int, weights: Collection[str]) -> bool:
    """Has every attention over a cache turn its queries and keys itself, in a model of ``count`` positions.

    ``GroupQueryAttention`` does with ``do_rotary`` what ``RotaryEmbedding`` does before it, by rows of ``cos_cache``
    and ``sin_cache`` that ``position_ids`` name. The positions are given in every layer: those of a window have other
    places in its buffer than in the text. An embedding that the operator does not take, or whose table would be larger
    than it is worth, is left.
    """
    positions = next((value for value in model.graph.inputs if value.name == POSITIONS), None)
    tables = None if positions is None else AngleTables(model, positions, count, weights)
    turned = [tables is not None and _turn(node, tables) for node in list(model.graph)]
    return any(turned)


def fuse_rotary(model: ir.Model) -> bool:
    """Makes one ``RotaryEmbedding`` of queries, or keys, of every attention over a cache.

    The operator takes ``[B, S, heads * D]`` and looks angles up by position; here they are those of the new tokens,
    ``[B * S, D / 2]``, in their order, so that every kind of positions stays what the model computes. Queries and keys
    whose positions are made in another way, or whose angles are not those of every row and token, are left.
    """
    places: ir.Value | None = None
    halves: dict[ir.Value, ir.Value] = {}
    changed = False
    for node in list(model.graph):
        for index in (0, 1) if node.op_type == CACHED_ATTENTION else ():
            found = turned_heads(node, index)
            angles = None if found is None else _angles(found)
            if found is None or angles is None or extents(model.graph.inputs[0]) != found.dims[:2]:
                continue  # the operator reads angles by the numbers of the tokens that the graph is given
            if places is None:
                places = _places(model.graph, angles[0])
            _fuse(found, places, [_half(halves, values) for values in angles])
            changed = True
    return changed


class TurnedHeads(NamedTuple):
    """``flat`` makes ``[B, S, heads * D]`` of ``x``, turned: ``[B, S, heads, D]``, or heads ``in_front`` of tokens.

    ``cos`` and ``sin`` are ``[B, S, 1, R]``, or ``[B, 1, S, R]``, for the first ``R`` numbers of every head. The first
    half of ``sin`` is negated where it ``is_signed``.
    """

    flat: ir.Node
    x: ir.Value
    in_front: bool
    cos: ir.Value
    sin: ir.Value
    is_signed: bool

    @property
    def dims(self) -> tuple[Extent, Extent, Extent, Extent]:
        """``(B, S, heads, D)``."""
        dims = extents(self.x)
        assert dims is not None
        rows, first, second, size = dims
        return (rows, second, first, size) if self.in_front else (rows, first, second, size)

    @property
    def turned(self) -> int:
        """``R``."""
        return last_extent(self.cos)


def turned_heads(attention: ir.Node, index: int) -> TurnedHeads | None:
    """The value behind input ``index`` of ``attention``, or None where it is not turned in this way."""
    flat = producer(attention, index, "Reshape")
    swapped = _heads_swapped(producer(flat, 0, "Transpose"))
    inner = flat if swapped is None else swapped
    joined = producer(inner, 0, "Concat")  # with numbers that are not turned
    total = producer(inner if joined is None else joined, 0, "Add")
    straight, crossed = producer(total, 0, "Mul"), producer(total, 1, "Mul")
    if flat is None or straight is None or crossed is None:
        return None
    part, cos, sin = straight.inputs[0], straight.inputs[1], crossed.inputs[1]
    x = part if joined is None else _whole(joined, part)
    if part is None or cos is None or sin is None or x is None:
        return None
    is_signed = _sines_have_signs(producer(crossed, 0, "Concat"), part)
    if is_signed is None or len(extents(x) or ()) != 4:
        return None
    found = TurnedHeads(flat, x, swapped is not None, cos, sin, is_signed)
    return found if _fits(found) else None


def heads_by_token(found: TurnedHeads) -> ir.Value:
    """``x`` as ``[B, S, heads, D]``, made in front of ``flat`` where nothing is that already."""
    maker = found.x.producer()
    if not found.in_front:
        return found.x
    swapped = _heads_swapped(maker)
    if swapped is not None and swapped.inputs[0] is not None:
        return swapped.inputs[0]
    before = _heads_swapped(producer(maker, 0, "Transpose"))
    if maker is not None and maker.op_type == NORM and before is not None:  # over the last dimension
        made = ir.Node("", NORM, [before.inputs[0], *maker.inputs[1:]], maker.attributes.values())
    else:
        made = ir.node("Transpose", [found.x], {"perm": _HEADS_TO_FRONT})
    made.outputs[0].shape, made.outputs[0].type = ir.Shape(list(found.dims)), found.x.type
    found.flat.prepend(made)
    return made.outputs[0]


def _heads_swapped(node: ir.Node | None) -> ir.Node | None:
    """``node`` where it exchanges the heads and the tokens of four dimensions."""
    return node if is_permuted(node, _HEADS_TO_FRONT) else None


def _fits(found: TurnedHeads) -> bool:
    """Whether all heads of a token are turned by its angles, an even number of them, and come out in their order."""
    rows, tokens, heads, size = found.dims
    angles = (rows, 1, tokens, found.turned) if found.in_front else (rows, tokens, 1, found.turned)
    is_even = isinstance(size, int) and found.turned % 2 == 0
    flat = (rows, tokens, product((heads, size)))
    return is_even and extents(found.cos) == extents(found.sin) == angles and extents(found.flat.outputs[0]) == flat


def _whole(joined: ir.Node, part: ir.Value | None) -> ir.Value | None:
    """The heads of which the first numbers are ``part``, and ``joined`` has the rest behind them as it is."""
    first = None if part is None else part.producer()
    x = None if first is None or first.op_type != "Slice" else first.inputs[0]
    if x is None or part is None or len(joined.inputs) != 2 or not is_last(joined.attributes.get_int("axis"), x):
        return None
    turned, size = last_extent(part), last_extent(x)
    is_split = sliced(first, x) == (0, turned) and sliced(producer(joined, 1, "Slice"), x) == (turned, size)
    return x if is_split else None


def _sines_have_signs(rotated: ir.Node | None, x: ir.Value) -> bool | None:
    """Whether ``rotated`` is the halves of ``x``, the second in front, as they are; False where that is negated, None
    where it is something else."""
    if (
        rotated is None
        or len(rotated.inputs) != 2
        or not is_last(rotated.attributes.get_int("axis"), x)
        or last_extent(x) % 2
    ):
        return None
    negated = producer(rotated, 0, "Neg")
    second, first = rotated.inputs[0] if negated is None else negated.inputs[0], rotated.inputs[1]
    return negated is None if _is_half(second, x, 1) and _is_half(first, x, 0) else None


def _is_half(value: ir.Value | None, x: ir.Value, number: int) -> bool:
    """Whether ``value`` is the first half of the last dimension of ``x`` (``number`` 0) or the second (1)."""
    node, half = None if value is None else value.producer(), last_extent(x) // 2
    if node is not None and node.op_type == "Split" and node.inputs[0] is x:
        of_last = len(node.outputs) == 2 and is_last(node.attributes.get_int("axis"), x)
        return of_last and last_extent(node.outputs[0]) == half and node.outputs[number] is value
    return sliced(node, x) == (number * half, (number + 1) * half)


def _turn(attention: ir.Node, tables: AngleTables) -> bool:
    queries = turned_heads(attention, _QUERY) if attention.op_type == CACHED_ATTENTION else None
    if queries is None or not _takes(attention, queries) or queries.dims[:2] != extents(tables.positions):
        return False
    keys, new = turned_heads(attention, _KEY), extents(attention.inputs[_KEY])
    is_reading = new is not None and len(new) == 3 and new[1] == 0  # keys of an earlier layer, turned by that one
    if not is_reading and (keys is None or keys[3:] != queries[3:]):
        return False
    angles = tables.of(queries.cos, queries.sin, queries.is_signed)
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
    flat, after = _flat(found), found.flat.outputs[0]
    before = flat.outputs[0]
    found.flat.prepend(flat)
    for use in list(after.uses()):
        made = extents(use.node.outputs[0])
        if use.node.op_type == "Slice" and made is not None and len(made) == 3 and made[1] == 0:
            use.node.replace_input_with(use.idx, before)
    return before


def _angles(found: TurnedHeads) -> list[ir.Value] | None:
    """Cosines and sines ``[B, S, D]`` of ``found``, if both halves of them are the same."""
    values = [_of_all_heads(spread, found) for spread in (found.cos, found.sin)]
    known = [value for value in values if value is not None]
    return known if len(known) == 2 and not found.is_signed else None


def _of_all_heads(spread: ir.Value, found: TurnedHeads) -> ir.Value | None:
    node = spread.producer()
    values = node.inputs[0] if node is not None and node.op_type == "Unsqueeze" else None
    rows, tokens, _, size = found.dims
    if values is None or extents(values) != (rows, tokens, size):
        return None
    node = values.producer()
    while node is not None and node.op_type in {*_ANGLES, "Mul"} and node.inputs[0] is not None:
        if node.op_type == "Mul" and scalar(node.inputs[1]) is None:
            return None
        node = node.inputs[0].producer()
    twice = node is not None and node.op_type == "Concat" and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    return values if twice and node is not None and node.attributes.get_int("axis") in (-1, 2) else None


def _places(graph: ir.Graph, cos: ir.Value) -> ir.Value:
    """The numbers 0, 1, ... of the new tokens ``[B, S]``, made before all that reads ``cos``."""
    ids = graph.inputs[0]
    shape = ir.node("Shape", [ids])
    zero, one = (ir.node("Constant", [], {"value": ir.tensor(np.array(value, np.int64))}) for value in (0, 1))
    count = ir.node("Size", [ids])
    numbers = ir.node("Range", [zero.outputs[0], count.outputs[0], one.outputs[0]])
    places = ir.node("Reshape", [numbers.outputs[0], shape.outputs[0]])
    places.outputs[0].shape, places.outputs[0].type = ids.shape, ids.type
    maker = cos.producer()
    assert maker is not None
    maker.append([shape, zero, one, count, numbers, places])
    return places.outputs[0]


def _half(known: dict[ir.Value, ir.Value], values: ir.Value) -> ir.Value:
    """The first half of cosines or sines ``[B, S, D]``, as ``[B * S, D / 2]``."""
    if values not in known:
        maker, rank = values.producer(), len(extents(values) or ())
        assert maker is not None
        bounds = [int64_constant([number]) for number in (0, last_extent(values) // 2, rank - 1)]
        half = ir.node("Slice", [values, *(bound.outputs[0] for bound in bounds)])
        flat = ir.node("Flatten", half.outputs, {"axis": rank - 1})
        maker.append([*bounds, half, flat])
        known[values] = flat.outputs[0]
    return known[values]


def _fuse(found: TurnedHeads, places: ir.Value, angles: list[ir.Value]) -> None:
    """Puts the operator behind the Reshape, which now comes first."""
    flat, after = _flat(found), found.flat.outputs[0]
    turned = ir.node("RotaryEmbedding", [flat.outputs[0], places, *angles], domain=MICROSOFT)
    found.flat.prepend([flat, turned])
    replace(after, turned.outputs[0])


def _flat(found: TurnedHeads) -> ir.Node:
    """Makes ``[B, S, heads * D]`` of the heads as they are before they are turned."""
    after = found.flat.outputs[0]
    flat = ir.node("Reshape", [heads_by_token(found), found.flat.inputs[1]])
    flat.outputs[0].shape, flat.outputs[0].type = after.shape, after.type
    return flat
