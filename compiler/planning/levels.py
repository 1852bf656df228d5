"""Submodels by name: levels (S, M, L, XL), the promotion ladder between them, labels, and ids that a request names.

The ladder climbs from one level to the next, layer by layer. A rung mixes two adjacent levels at most, so its widths
rise with the least slope that its size allows. The promotion order says which ``k`` of ``l`` layers have the larger
level:

- ``increasing``: the last ``k``; the default, and the order that nested training favours most.
- ``decreasing``: the first ``k``.
- ``up-down``: the ``k`` in the middle, so that widths rise and then fall; of two middles the later one.
- ``down-up``: the first ``k // 2`` and the rest of the ``k`` at the end, so that widths fall and then rise.

Each step promotes one layer more and demotes none, so figures never fall along a ladder. Where all layers are of one
size, rung ``n`` has the same parameters in every order. A rung's label follows from levels and promotion order alone,
whatever budgets choose.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import floor, isclose, isfinite
from string import ascii_lowercase
from typing import get_args

from ...elastic import Axis, ElasticSpec, Submodel, canonical
from ...errors import PlanError
from ...profiles.device_profile import DeviceProfile, PromotionOrder
from ...profiles.precision import PRECISIONS, Precision, highest_first
from ...strict import nearest

# Fractions that MatFormer trains; and even steps for a model whose order comes from a ranking.
NESTED_FRACTIONS = (0.125, 0.25, 0.5, 1.0)
RANKED_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
_FOUR_LEVEL_NAMES = ("S", "M", "L", "XL")
PROMOTION_ORDERS: tuple[PromotionOrder, ...] = get_args(PromotionOrder)
# The first and the last of a ladder, which has a rung for every layer between two levels.
_SHOWN_LABELS = 5


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
    Every level has the highest precision. Raises PlanError for an unknown kind, fractions that do not increase to 1,
    and levels that could not be told apart.
    """
    if fractions is None:
        fractions = _default(spec)
    if not spec.axes and not fractions:
        return (Level("100%", spec.universal()),)
    _check(spec, fractions)
    count = len(next(iter(fractions.values())))
    shares = [{kind: steps[index] for kind, steps in fractions.items()} for index in range(count)]
    labels = [_label(spec, share, index, count) for index, share in enumerate(shares)]
    for number, label in enumerate(labels):
        if label in labels[:number]:
            pair = " and ".join(_shown(shares[index]) for index in (labels.index(label), number))
            raise PlanError(f"levels: {pair} are both {label}; expected fractions that lead to different values")
    return tuple(_level(label, spec, share, width_multiple) for label, share in zip(labels, shares, strict=True))


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


def rung_labels(levels: Sequence[Level], profile: DeviceProfile) -> dict[Submodel, tuple[str, ...]]:
    """Every rung of the ladder in every precision with its labels, smallest first; a label of another precision than
    the highest ends in that: ``M.int8``."""
    labels: dict[Submodel, tuple[str, ...]] = {}
    for rung, between in labelled_ladder(levels, profile.promotion_order):
        own = tuple(level.label for level in levels if level.submodel == rung) or (between,)
        for each in in_every_precision([rung], profile.precisions):
            suffix = "" if each.precision is None else f".{each.precision}"
            labels[each] = tuple(f"{label}{suffix}" for label in own)
    return labels


def in_every_precision(rungs: Sequence[Submodel], precisions: Sequence[Precision]) -> tuple[Submodel, ...]:
    """Every rung in every one of ``precisions``, the highest last, so that the last one which fits a budget is the
    largest rung, in the highest precision that it fits in."""
    _, *others = highest_first(precisions)
    lowest_first = (*reversed(others), None)  # the highest goes without saying
    return tuple(replace(rung, precision=precision) for rung in rungs for precision in lowest_first)


def letters(submodels: Iterable[Submodel]) -> dict[Submodel, tuple[str, ...]]:
    """Labels of submodels beside the ladder, in this order: ``a`` to ``z`` and then ``aa``, ``ab`` ...."""
    return {submodel: (_letter(number),) for number, submodel in enumerate(submodels)}


def read_assignment(spec: ElasticSpec, submodel_id: str, levels: Sequence[Level], profile: DeviceProfile) -> Submodel:
    """The submodel that ``submodel_id`` names, which may be the label of a rung, with or without its precision.

    Raises PlanError for an id that does not fit the model's axes, and for a width that is no multiple of
    the profile's width unless it is that of a level or the full one.
    """
    width_multiple = profile.width_multiple
    rungs = {label: submodel for submodel, own in rung_labels(levels, profile).items() for label in own}
    label, _, precision = submodel_id.rpartition(".")
    if submodel_id in rungs:
        return rungs[submodel_id]
    if label in rungs and precision in PRECISIONS:
        return replace(rungs[label], precision=spec.named_precision(submodel_id, precision))
    try:
        submodel = spec.parse(submodel_id)
    except PlanError as failure:
        if submodel_id.startswith(tuple(spec.kinds)):
            raise
        known = list(rungs)
        if len(known) > 2 * _SHOWN_LABELS:
            known[_SHOWN_LABELS:-_SHOWN_LABELS] = ["..."]
        raise PlanError(f"{failure}, or labels: {', '.join(known)}") from None
    for axis, value in submodel.values:
        off = axis.kind in spec.widths and axis.choices is None and value % width_multiple
        if off and value not in _widths(axis, levels):
            below = value - value % width_multiple
            near = [str(width) for width in (below, min(below + width_multiple, axis.size)) if width]
            raise PlanError(
                f"submodel {submodel_id[:80]!r}: {axis.name} {value} is neither a multiple of {width_multiple}, as the "
                f"profile asks, nor the width of a level; nearest: {' and '.join(near)}"
            )
    return submodel


def unusual(submodels: Iterable[Submodel], levels: Sequence[Level]) -> Iterator[str]:
    """Notes on submodels beside the ladder: what sets them apart from rungs, which training and ranking speak for."""
    for submodel in submodels:
        for kind in dict.fromkeys(axis.kind for axis, _ in submodel.values):
            values = [value for axis, value in submodel.values if axis.kind == kind]
            if any(later < earlier for earlier, later in pairwise(values)):
                yield f"{submodel.id}: {kind} shrinks with depth, which rungs of the increasing ladder never do"
            if leap := _leap([axis for axis, _ in _running(submodel) if axis.kind == kind], submodel, levels):
                yield f"{submodel.id}: {leap}"
        off = [f"{axis.name} {value}" for axis, value in submodel.values if value not in _widths(axis, levels)]
        if off:
            yield f"{submodel.id}: on no level: {', '.join(off)}"


def _letter(number: int) -> str:
    more, last = divmod(number, len(ascii_lowercase))
    return (_letter(more - 1) if more else "") + ascii_lowercase[last]


def _default(spec: ElasticSpec) -> dict[str, Sequence[float]]:
    if spec.granularities is not None:
        return dict(spec.granularities)
    chosen = {axis.kind: list(map(axis.share, axis.choices)) for axis in spec.axes if axis.choices}
    if chosen:
        most = max(map(len, chosen.values()))
        return {kind: steps for kind, steps in chosen.items() if len(steps) == most}
    return dict.fromkeys(spec.kinds, NESTED_FRACTIONS if spec.trained_nested else RANKED_FRACTIONS)


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
    choices = {axis.kind: axis for axis in spec.axes if axis.choices}
    if shares.keys() <= choices.keys():
        values = {kind: _rounded(choices[kind], choices[kind].at(share), 1) for kind, share in shares.items()}
        return "-".join(f"{kind}{value}" for kind, value in values.items())
    return _FOUR_LEVEL_NAMES[index] if count == len(_FOUR_LEVEL_NAMES) else f"{100 * next(iter(shares.values())):g}%"


def _shown(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {share:g}" for kind, share in shares.items())


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


def _running(submodel: Submodel) -> Iterator[tuple[Axis, int]]:
    """The axes of the layers that run, and of no layer."""
    depth = submodel.depth
    return ((a, value) for a, value in submodel.values if a.runs_at(depth))


def _widths(axis: Axis, levels: Sequence[Level]) -> list[int]:
    return [*(level.submodel[axis.name] for level in levels), axis.size]


def _leap(axes: Sequence[Axis], submodel: Submodel, levels: Sequence[Level]) -> str | None:
    """The levels that a submodel skips between two of its widths of one kind; None if those it has are adjacent."""
    used = sorted(
        {i for i, level in enumerate(levels) for axis in axes if level.submodel[axis.name] == submodel[axis.name]}
    )
    skipped = [i for low, high in pairwise(used) for i in range(low + 1, high)]
    if not skipped:
        return None
    mixed, left_out = (" and ".join(levels[i].label for i in some) for some in (used, skipped))
    return f"{axes[0].kind} mixes levels {mixed} and skips {left_out}"
