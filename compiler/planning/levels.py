"""Granularities: the uniform submodels (S, M, L, XL) that the promotion ladder climbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor, isclose, isfinite

from ...elastic import BITS, Axis, ElasticSpec, Submodel
from ...errors import PlanError
from ...strict import nearest

# What MatFormer trains; and even steps for a model whose order comes from a ranking.
NESTED_FRACTIONS = (0.125, 0.25, 0.5, 1.0)
RANKED_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
_FOUR_LEVEL_NAMES = ("S", "M", "L", "XL")


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

    ``fractions`` maps an axis kind to one fraction per level; a kind left out keeps its full size. ``None`` takes the
    levels that training sampled, where the spec knows them. Else it moves the kinds with choices alone, choice by
    choice, where there are any: those with most choices, if kinds differ in how many they have. Else it moves all kinds
    together through 1/8, 1/4, 1/2, 1 for a model that was trained nested and 1/4, 1/2, 3/4, 1 otherwise.
    The spec's ``widths`` are rounded to the nearest multiple of ``width_multiple`` (at least one, never above the
    size), kinds with choices to the one whose share of the whole is nearest, other kinds to whole steps (at least one).
    Every level has the widest precision. Raises PlanError for an unknown kind, fractions that do not increase to 1, and
    levels that could not be told apart.
    """
    if fractions is None:
        fractions = _default(spec)
    if not _axes(spec) and not fractions:
        return (Level("100%", spec.universal()),)
    _check(spec, fractions)
    count = len(next(iter(fractions.values())))
    shares = [{kind: steps[index] for kind, steps in fractions.items()} for index in range(count)]
    labels = [_label(spec, share, index, count) for index, share in enumerate(shares)]
    for number, label in enumerate(labels):
        if label in labels[:number]:
            asked = " and ".join(_shown(shares[index]) for index in (labels.index(label), number))
            raise PlanError(f"levels: {asked} are both {label}; expected fractions that lead to different values")
    return tuple(_level(label, spec, share, width_multiple) for label, share in zip(labels, shares, strict=True))


def _axes(spec: ElasticSpec) -> list[Axis]:
    """What levels move: a precision is chosen beside them."""
    return [axis for axis in spec.axes if axis.name != BITS]


def _kinds(spec: ElasticSpec) -> list[str]:
    return list(dict.fromkeys(axis.kind for axis in _axes(spec)))


def _default(spec: ElasticSpec) -> dict[str, Sequence[float]]:
    if spec.granularities is not None:
        return dict(spec.granularities)
    chosen = {axis.kind: list(map(axis.share, axis.choices)) for axis in _axes(spec) if axis.choices}
    if chosen:
        most = max(map(len, chosen.values()))
        return {kind: steps for kind, steps in chosen.items() if len(steps) == most}
    return dict.fromkeys(_kinds(spec), NESTED_FRACTIONS if spec.trained_nested else RANKED_FRACTIONS)


def _level(label: str, spec: ElasticSpec, shares: Mapping[str, float], width_multiple: int) -> Level:
    values: dict[str, int] = {}
    rounding: dict[str, None] = {}
    for axis in spec.axes:
        exact = axis.at(shares.get(axis.kind, 1.0))
        multiple = width_multiple if axis.kind in spec.widths else spec.multiples.get(axis.kind, 1)
        values[axis.name] = _rounded(axis, exact, multiple)
        if not isclose(values[axis.name], exact):
            unit = f"a multiple of {multiple}" if multiple > 1 else "a choice" if axis.choices else "whole steps"
            whole = "" if axis.falls else f" of {axis.size}"
            rounding[f"{label}: {axis.kind} {exact:g}{whole} rounded to {values[axis.name]} ({unit})"] = None
    return Level(label, spec.submodel(values), tuple(rounding))


def _rounded(axis: Axis, exact: float, multiple: int) -> int:
    # The full size stays as it is, even where it is no multiple: the last level is the universal model.
    if exact == axis.size:
        return axis.size
    if axis.choices:
        return min(axis.choices, key=lambda choice: (abs(axis.share(choice) - axis.share(exact)), axis.share(choice)))
    return min(axis.size, max(1, floor(exact / multiple + 0.5)) * multiple)


def _label(spec: ElasticSpec, shares: Mapping[str, float], index: int, count: int) -> str:
    """``S`` to ``XL`` for four levels, else the first fraction; ``depth6`` where kinds with choices move alone."""
    choices = {axis.kind: axis for axis in _axes(spec) if axis.choices}
    if shares.keys() <= choices.keys():
        values = {kind: _rounded(choices[kind], choices[kind].at(share), 1) for kind, share in shares.items()}
        return "-".join(f"{kind}{value}" for kind, value in values.items())
    return _FOUR_LEVEL_NAMES[index] if count == len(_FOUR_LEVEL_NAMES) else f"{100 * next(iter(shares.values())):g}%"


def _shown(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {share:g}" for kind, share in shares.items())


def _check(spec: ElasticSpec, fractions: Mapping[str, Sequence[float]]) -> None:
    if not fractions:
        raise PlanError(f"levels: expected fractions for at least one of {', '.join(_kinds(spec))}, got none")
    for kind, steps in fractions.items():
        if kind not in _kinds(spec):
            raise PlanError(f"levels: this model has no axis kind {kind!r}{nearest(kind, _kinds(spec))}")
        increasing = all(low < high for low, high in pairwise(steps))
        if not steps or not all(map(isfinite, steps)) or steps[0] <= 0 or not increasing or steps[-1] != 1:
            shown = ", ".join(f"{step:g}" for step in steps)
            raise PlanError(f"levels: {kind}: expected fractions that increase from above 0 to 1, got [{shown}]")
    if len({len(steps) for steps in fractions.values()}) > 1:
        counts = ", ".join(f"{kind} has {len(steps)}" for kind, steps in fractions.items())
        raise PlanError(f"levels: expected equally many fractions for every axis kind, but {counts}")
