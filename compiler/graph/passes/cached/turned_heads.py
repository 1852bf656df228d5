"""Heads of queries or keys that are turned to rotary positions, as graphs spell it out before attention over a cache.

``x * cos + rotated(x) * sin`` (Su et al. 2021, section 3.4.2, in the order of GPT-NeoX), where ``rotated`` has the
second half of the last dimension, negated, in front of the first; or as it is, and the sines have the signs. All
numbers of a head are turned so, or the first ones alone.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from ..extents import Extent, extents, product, shape_of
from ..matching import producer, scalar

_NORM = "SimplifiedLayerNormalization"


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
        return _last(self.cos)


def turned_heads(attention: ir.Node, index: int) -> TurnedHeads | None:
    """What input ``index`` of ``attention`` is, or None where it is not turned in this way."""
    flat = producer(attention, index, "Reshape")
    swapped = heads_swapped(producer(flat, 0, "Transpose"))
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
    swapped = heads_swapped(maker)
    if swapped is not None and swapped.inputs[0] is not None:
        return swapped.inputs[0]
    before = heads_swapped(producer(maker, 0, "Transpose"))
    if maker is not None and maker.op_type == _NORM and before is not None:  # over the last dimension
        made = ir.Node("", _NORM, [before.inputs[0], *maker.inputs[1:]], maker.attributes.values())
    else:
        made = ir.node("Transpose", [found.x], {"perm": [0, 2, 1, 3]})
    made.outputs[0].shape, made.outputs[0].type = shape_of(found.dims), found.x.type
    found.flat.prepend(made)
    return made.outputs[0]


def heads_swapped(node: ir.Node | None) -> ir.Node | None:
    """``node`` where it exchanges the heads and the tokens of four dimensions."""
    permutation = None if node is None or node.op_type != "Transpose" else node.attributes.get_ints("perm")
    return node if permutation is not None and tuple(permutation) == (0, 2, 1, 3) else None


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
    if x is None or part is None or len(joined.inputs) != 2 or not _is_of_last(joined, x):
        return None
    turned, size = _last(part), _last(x)
    is_split = _is_slice(first, x, 0, turned) and _is_slice(producer(joined, 1, "Slice"), x, turned, size)
    return x if is_split else None


def _sines_have_signs(rotated: ir.Node | None, x: ir.Value) -> bool | None:
    """Whether ``rotated`` is the halves of ``x``, the second in front, as they are; False where that is negated, None
    where it is something else."""
    if rotated is None or len(rotated.inputs) != 2 or not _is_of_last(rotated, x) or _last(x) % 2:
        return None
    negated = producer(rotated, 0, "Neg")
    second, first = rotated.inputs[0] if negated is None else negated.inputs[0], rotated.inputs[1]
    return negated is None if _is_half(second, x, 1) and _is_half(first, x, 0) else None


def _is_half(value: ir.Value | None, x: ir.Value, number: int) -> bool:
    """Whether ``value`` is the first half of the last dimension of ``x`` (``number`` 0) or the second (1)."""
    node, half = None if value is None else value.producer(), _last(x) // 2
    if node is not None and node.op_type == "Split" and node.inputs[0] is x:
        halves = len(node.outputs) == 2 and _is_of_last(node, x) and _last(node.outputs[0]) == half
        return halves and node.outputs[number] is value
    return node is not None and node.op_type == "Slice" and _is_slice(node, x, number * half, (number + 1) * half)


def _is_of_last(node: ir.Node, x: ir.Value) -> bool:
    """Whether ``node`` works along the last dimension of ``x``."""
    return node.attributes.get_int("axis") in (-1, len(extents(x) or ()) - 1)


def _is_slice(node: ir.Node | None, x: ir.Value, start: int, stop: int) -> bool:
    """Whether ``node`` takes ``start`` to ``stop`` of the last dimension, ``stop`` being its end or not."""
    if node is None or node.inputs[0] is not x or len(node.inputs) < 4:
        return False
    first, last, axis = (scalar(value) for value in node.inputs[1:4])
    step = scalar(node.inputs[4]) if len(node.inputs) > 4 else 1
    shape = extents(x) or ()
    stops = last == stop or (last is not None and stop == shape[-1] and last >= stop)
    return first == start and stops and axis in (-1, len(shape) - 1) and step == 1


def _last(value: ir.Value) -> int:
    """The extent of the last dimension, or 0 where it is not known."""
    dims = extents(value) or (0,)
    return dims[-1] if isinstance(dims[-1], int) else 0
