"""Granularities: the uniform submodels (S, M, L, XL) that the promotion ladder climbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor, isfinite

from ..elastic import Axis, ElasticSpec, Submodel
from ..errors import PlanError
from ..strict import nearest

# What MatFormer trains; and even steps for a model whose order comes from a ranking.
NESTED_FRACTIONS = (0.125, 0.25, 0.5, 1.0)
RANKED_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
_NAMES = ("S", "M", "L", "XL")


@dataclass(frozen=True)
class Level:
    """One uniform submodel. ``rounding`` states every value that is not the exact fraction of its axis."""

    label: str
    submodel: Submodel
    rounding: tuple[str, ...] = ()


def levels(
    spec: ElasticSpec, fractions: Mapping[str, Sequence[float]] | None, width_multiple: int
) -> tuple[Level, ...]:
    """Levels of ``spec``, smallest first; the last is the universal model.

    ``fractions`` maps an axis kind to one fraction per level; a kind left out keeps its full size. ``None`` moves all
    kinds together through 1/8, 1/4, 1/2, 1 for a model that was trained nested and 1/4, 1/2, 3/4, 1 otherwise.
    The spec's ``widths`` are rounded to the nearest multiple of ``width_multiple`` (at least one, never above the
    size), other kinds to whole steps (at least one).
    Raises PlanError for an unknown kind or fractions that do not increase to 1.
    """
    if fractions is None:
        fractions = dict.fromkeys(spec.kinds, NESTED_FRACTIONS if spec.trained_nested else RANKED_FRACTIONS)
    _check(spec, fractions)
    first = next(iter(fractions.values()))
    return tuple(
        _level(_label(index, first), spec, {kind: steps[index] for kind, steps in fractions.items()}, width_multiple)
        for index in range(len(first))
    )


def _level(label: str, spec: ElasticSpec, shares: Mapping[str, float], width_multiple: int) -> Level:
    values: dict[str, int] = {}
    rounding: dict[str, None] = {}
    for axis in spec.axes:
        exact = shares.get(axis.kind, 1.0) * axis.size
        multiple = width_multiple if axis.kind in spec.widths else 1
        values[axis.name] = _rounded(axis, exact, multiple)
        if values[axis.name] != exact:
            unit = f"a multiple of {multiple}" if multiple > 1 else "whole steps"
            rounding[f"{label}: {axis.kind} {exact:g} of {axis.size} rounded to {values[axis.name]} ({unit})"] = None
    return Level(label, spec.submodel(values), tuple(rounding))


def _rounded(axis: Axis, exact: float, multiple: int) -> int:
    # The full size stays as it is, even where it is no multiple: the last level is the universal model.
    if exact == axis.size:
        return axis.size
    return min(axis.size, max(1, floor(exact / multiple + 0.5)) * multiple)


def _label(index: int, fractions: Sequence[float]) -> str:
    return _NAMES[index] if len(fractions) == len(_NAMES) else f"{100 * fractions[index]:g}%"


def _check(spec: ElasticSpec, fractions: Mapping[str, Sequence[float]]) -> None:
    if not fractions:
        raise PlanError(f"levels: expected fractions for at least one of {', '.join(spec.kinds)}, got none")
    for kind, steps in fractions.items():
        if kind not in spec.kinds:
            raise PlanError(f"levels: this model has no axis kind {kind!r}{nearest(kind, spec.kinds)}")
        increasing = all(low < high for low, high in pairwise(steps))
        if not steps or not all(map(isfinite, steps)) or steps[0] <= 0 or not increasing or steps[-1] != 1:
            shown = ", ".join(f"{step:g}" for step in steps)
            raise PlanError(f"levels: {kind}: expected fractions that increase from above 0 to 1, got [{shown}]")
    if len({len(steps) for steps in fractions.values()}) > 1:
        counts = ", ".join(f"{kind} has {len(steps)}" for kind, steps in fractions.items())
        raise PlanError(f"levels: expected equally many fractions for every axis kind, but {counts}")
