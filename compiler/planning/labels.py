"""Short names of submodels: a level's own, ``M+2`` of the rung with two layers promoted from it, and letters.

A rung's label follows from levels and promotion order alone, whatever budgets choose. Submodels that were asked for
beside the ladder are ``a``, ``b``, ``c`` ... in the order in which they were asked for. In another precision than the
widest the label ends in that: ``M.int8``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from string import ascii_lowercase

from ...elastic import Submodel
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import precision_of
from .ladder import in_every_precision, labelled_ladder
from .levels import Level


def rung_labels(levels: Sequence[Level], profile: DeviceProfile) -> dict[Submodel, tuple[str, ...]]:
    """Every rung of the ladder in every precision with its labels, smallest first."""
    labels: dict[Submodel, tuple[str, ...]] = {}
    for rung, between in labelled_ladder(levels, profile.promotion_order):
        own = tuple(level.label for level in levels if level.submodel == rung) or (between,)
        for each in in_every_precision([rung]):
            suffix = "" if each == rung else f".{precision_of(each, profile.precisions)}"
            labels[each] = tuple(f"{label}{suffix}" for label in own)
    return labels


def letters(submodels: Iterable[Submodel]) -> dict[Submodel, tuple[str, ...]]:
    """``a`` to ``z`` and then ``aa``, ``ab`` ..., in this order."""
    return {submodel: (_letter(number),) for number, submodel in enumerate(submodels)}


def labelled(name: str, labels: Mapping[Submodel, tuple[str, ...]]) -> Submodel | None:
    """The rung that ``name`` is a label of, None of a name that is none."""
    return next((submodel for submodel, own in labels.items() if name in own), None)


def _letter(number: int) -> str:
    more, last = divmod(number, len(ascii_lowercase))
    return (_letter(more - 1) if more else "") + ascii_lowercase[last]
