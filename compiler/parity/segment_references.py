"""What the segments of a submodel return in one uncut pass in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...exporters.exits import Exits
from .cases import Case
from .reference import Reference, replayed
from .replayed import Replayed


def by_segment(exits: Exits, reference: Reference, depth: int, cases: Sequence[Case]) -> list[Replayed]:
    """Per segment of a submodel, which has ``depth`` layers: what one uncut pass of its ``reference`` has there."""
    segments = [segment for segment in exits.entry.segments if segment.layer <= depth]
    names = [{f"{segment.name} {spec.name}": spec.name for spec in segment.outputs} for segment in segments]
    specs = [replace(spec, name=f"{segment.name} {spec.name}") for segment in segments for spec in segment.outputs]
    whole = replayed(reference.viewed(exits.every_exit, specs), cases)
    return [whole.of(own) for own in names]
