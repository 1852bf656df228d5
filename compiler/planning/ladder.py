"""The promotion ladder: from one level to the next, layer by layer, in one of four orders.

A rung mixes two adjacent levels at most, so its widths rise with the least slope that its size allows. The
promotion order says which ``k`` of ``l`` layers have the larger level:

- ``increasing``: the last ``k``. What nested training favours most, and the default.
- ``decreasing``: the first ``k``.
- ``up-down``: the ``k`` in the middle, so that widths rise and then fall; of two middles the later one.
- ``down-up``: the first ``k // 2`` and the rest of the ``k`` at the end, so that widths fall and then rise.

Each step promotes one layer more and demotes none, so figures never fall along a ladder. Where all layers are of one
size, rung ``n`` has the same parameters in every order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

from ...elastic import BITS, Submodel, canonical
from ...profiles.device_profile import PromotionOrder
from .levels import Level

PROMOTION_ORDERS: tuple[PromotionOrder, ...] = get_args(PromotionOrder)


def ladder(levels: Sequence[Level], order: PromotionOrder = "increasing") -> tuple[Submodel, ...]:
    """``(g - 1) * l + 1`` rungs for ``g`` levels and ``l`` layers, smallest first.

    All axes of a layer are promoted together; axes outside the layers move with the next full level. Rungs that
    rounding makes equal appear once.
    """
    return tuple(rung for rung, _ in labelled_ladder(levels, order))


def labelled_ladder(levels: Sequence[Level], order: PromotionOrder) -> tuple[tuple[Submodel, str], ...]:
    """The rungs of ``ladder``, each with its label: ``M+2`` has two layers promoted from level ``M``."""
    layers = sorted({axis.layer for axis, _ in levels[0].submodel.values if axis.layer is not None})
    rungs: dict[Submodel, str] = {}
    for low, high in pairwise(levels):
        for count in range(max(1, len(layers))):
            raised = promoted(layers, count, order)
            values = tuple(
                (axis, high.submodel[axis.name] if axis.layer in raised else value)
                for axis, value in low.submodel.values
            )
            rungs.setdefault(canonical(values), f"{low.label}+{count}" if count else low.label)
    rungs.setdefault(levels[-1].submodel, levels[-1].label)
    return tuple(rungs.items())


def promoted(layers: Sequence[int], count: int, order: PromotionOrder) -> frozenset[int]:
    """The ``count`` of ``layers`` (in order) that have the larger level."""
    rest = len(layers) - count
    match order:
        case "increasing":
            return frozenset(layers[rest:])
        case "decreasing":
            return frozenset(layers[:count])
        case "up-down":
            start = (rest + 1) // 2
            return frozenset(layers[start : start + count])
        case "down-up":
            return frozenset((*layers[: count // 2], *layers[rest + count // 2 :]))


def in_every_precision(rungs: Sequence[Submodel]) -> tuple[Submodel, ...]:
    """Every rung in every precision that it may have, narrow before wide, so that the last one which fits a budget is
    the largest rung, in the widest precision that it fits in."""
    widths = next((axis.choices for axis, _ in rungs[0].values if axis.name == BITS), None) or ()
    return tuple(rung.at_bits(bits) for rung in rungs for bits in widths) if widths else tuple(rungs)
