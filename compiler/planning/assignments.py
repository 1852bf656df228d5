"""Submodels that were asked for by id: read, refused where the hardware cannot use them, and what is unusual there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

from ...elastic import BITS, Axis, ElasticSpec, Submodel
from ...errors import PlanError
from ...profiles.device_profile import DeviceProfile
from .labels import labelled, rung_labels
from .levels import Level

# The first and the last of a ladder, which has a rung for every layer between two levels.
_SHOWN_LABELS = 5


def read_assignment(spec: ElasticSpec, submodel_id: str, levels: Sequence[Level], profile: DeviceProfile) -> Submodel:
    """The submodel that ``submodel_id`` names, which may be the label of a rung.

    Raises PlanError for an id that does not fit the model's axes, and for a width that is no multiple of
    the profile's width unless it is that of a level or the full one.
    """
    labels, width_multiple = rung_labels(levels, profile), profile.width_multiple
    if rung := labelled(submodel_id, labels):
        return rung
    try:
        submodel = spec.parse(submodel_id)
    except PlanError as failure:
        if submodel_id.startswith(tuple(spec.kinds)):
            raise
        known = list(chain.from_iterable(labels.values()))
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
    """What sets submodels that were asked for apart from rungs: no training and no ranking speaks for it."""
    for submodel in submodels:
        for kind, values in submodel.by_kind().items():
            if any(later < earlier for earlier, later in pairwise(values)):
                yield f"{submodel.id}: {kind} shrinks with depth, which rungs of the increasing ladder never do"
            if leap := _leap([axis for axis, _ in _running(submodel) if axis.kind == kind], submodel, levels):
                yield f"{submodel.id}: {leap}"
        off = [
            f"{axis.name} {value}"
            for axis, value in submodel.values
            if axis.name != BITS and value not in _widths(axis, levels)
        ]
        if off:
            yield f"{submodel.id}: on no level: {', '.join(off)}"


def _running(submodel: Submodel) -> Iterator[tuple[Axis, int]]:
    """The axes of the layers that run, and of no layer."""
    depth = submodel.depth
    return ((a, value) for a, value in submodel.values if depth is None or a.layer is None or a.layer < depth)


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
