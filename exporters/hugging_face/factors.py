"""Dimensions as products of factors, slowest first, which are found to be one and the same or made of others.

As in ``compiler/graph/passes/free_elastic_dims.py``: what a query projection makes is ``(heads * 32)``, and after the
split ``heads, 32``. Anything done to a factor beside carrying it is noted as the reason why it cannot shrink.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Factor:
    """``size`` steps; ``parts`` are what it was found to be made of, or the factor that it was found to be."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: tuple[Factor, ...] = ()
        self.reasons: dict[str, None] = {}


Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]
# Why the numbers of one head do not shrink.
WITHIN = "attention multiplies along it"


def leaves(dim: Iterable[Factor]) -> list[Factor]:
    """The factors that ``dim`` is now known to be made of, without those of one step."""
    found: list[Factor] = []
    for factor in dim:
        found += leaves(factor.parts) if factor.parts else [factor] if factor.size > 1 else []
    return found


def block(dims: Iterable[Dim], reason: str) -> None:
    """Notes why no factor of ``dims`` can shrink."""
    for dim in dims:
        for factor in leaves(dim):
            factor.reasons[reason] = None


def _split(factor: Factor, slower: int) -> Dim:
    """Finds that ``factor`` is ``slower`` times something."""
    parts = Factor(slower), Factor(factor.size // slower)
    for part in parts:
        part.reasons |= factor.reasons
    factor.parts = parts
    return parts


def unify(one: Iterable[Factor], other: Iterable[Factor]) -> None:
    """Makes two dimensions of one extent the same, factor by factor."""
    left, right = leaves(one), leaves(other)
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if a.parts or b.parts:  # found by a pair before
            left[:0], right[:0] = leaves([a]), leaves([b])
        elif a.size == b.size:
            if a is not b:
                b.parts = (a,)
                a.reasons |= b.reasons
        elif a.size % b.size == 0:
            left[:0], right[:0] = _split(a, b.size), [b]
        elif b.size % a.size == 0:
            left[:0], right[:0] = [a], _split(b, a.size)
        else:
            block([(a, b, *left, *right)], "its steps are cut across")
            return


def regroup(dims: Dims, shape: Sequence[int]) -> Dims:
    """The same factors as dimensions of ``shape``."""
    left = leaves(factor for dim in dims for factor in dim)
    found: list[Dim] = []
    for extent in shape:
        taken: list[Factor] = []
        while extent > 1:
            if not left:
                return tuple((Factor(size),) for size in shape)
            factor = left.pop(0)
            if extent % factor.size and factor.size % extent == 0:
                factor, rest = _split(factor, extent)
                left.insert(0, rest)
            if extent % factor.size:
                block([(factor, *taken, *left, *(f for dim in found for f in dim))], "a view cuts across its steps")
                return tuple((Factor(size),) for size in shape)
            extent //= factor.size
            taken.append(factor)
        found.append(tuple(taken))
    return tuple(found)
