"""By which axes that shrinks which a model with MHE attention, or another, keeps of a token."""

from __future__ import annotations

from ...cached_form import KeptAxes
from .architecture.config import MheConfig
from .architecture.forms import cached_heads
from .architecture.places import places_of


def kept_axes(config: MheConfig, role: str) -> tuple[KeptAxes, ...]:
    """Of attention in ``role``, layer by layer; none where all submodels keep the same: heads that all read one pair of
    keys and values leave that as it is."""
    axes = [place.axis for place in places_of(config) if place.role == role]
    if config.width_first:
        return tuple(KeptAxes(size=axis) for axis in axes if axis is not None)
    return tuple(KeptAxes(heads=axis) for axis in axes if axis is not None and cached_heads(config) > 1)
