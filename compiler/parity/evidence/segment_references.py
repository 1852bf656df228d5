"""What the segments of a submodel return in one uncut pass in PyTorch."""

from __future__ import annotations

from dataclasses import replace

from ....bundle.entries.exits_entry import SegmentEntry
from ....exporters.parts import Exits
from .reference import Reference
from .replayed import Replayed


def every_exit(exits: Exits, reference: Reference, depth: int) -> Reference:
    """One pass of ``reference``, of a submodel of ``depth`` layers, with the outputs of all its segments."""
    specs = [
        replace(spec, name=_name(segment, spec.name)) for segment in _segments(exits, depth) for spec in segment.outputs
    ]
    return reference.viewed(exits.every_exit, specs)


def split(exits: Exits, whole: Replayed, depth: int) -> list[Replayed]:
    """Per segment of a submodel of ``depth`` layers, its part of a pass that has these segments and perhaps more."""
    return [
        whole.of({_name(segment, spec.name): spec.name for spec in segment.outputs})
        for segment in _segments(exits, depth)
    ]


def _segments(exits: Exits, depth: int) -> list[SegmentEntry]:
    return [segment for segment in exits.entry.segments if segment.layer <= depth]


def _name(segment: SegmentEntry, output: str) -> str:
    return f"{segment.name} {output}"
