"""Where a model with exits may be cut, and the modules of each segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..bucket import Bucket
from ..bundle.entries.exits_entry import ExitsEntry
from ..elastic import Submodel
from ..errors import PlanError
from ..workload import Op
from .part import Part

if TYPE_CHECKING:  # plans are made without torch
    import torch


class Exits(ABC):
    """The exits of one model and the segments between them. ``entry`` and ``workload`` must work without torch."""

    @abstractmethod
    def cut_at(self, layers: tuple[int, ...]) -> Exits:
        """The same model cut at the exits after ``layers`` alone, at least two of them, rising to its last."""

    @property
    @abstractmethod
    def entry(self) -> ExitsEntry:
        """Names, shapes and layers of every segment, as the manifest records them."""

    @abstractmethod
    def workload(self, submodel: Submodel, bucket: Bucket, segment: int) -> list[Op]:
        """The operations of one pass through segment number ``segment``."""

    @abstractmethod
    def segment(self, module: torch.nn.Module, segment: int) -> torch.nn.Module:
        """Segment number ``segment`` of ``module`` on its weights; that is what ``Architecture.load`` returned, perhaps
        narrowed.

        ``forward`` takes the segment's inputs by position and returns its outputs as a tuple; the user's module is
        attribute ``model``, as in ``Architecture.load``.
        """

    @property
    def parts(self) -> tuple[Part, ...]:
        """The segments, each by itself."""
        return tuple(
            Part(
                entry.name,
                entry.inputs,
                entry.outputs,
                partial(self.workload, segment=number),
                partial(self.segment, segment=number),
                entry.layer,
            )
            for number, entry in enumerate(self.entry.segments)
        )

    @abstractmethod
    def every_exit(self, module: torch.nn.Module) -> torch.nn.Module:
        """``module`` with the outputs of all its segments, in order: one pass, nothing cut. What a chain must equal."""


def chosen_exits(exits: Sequence[int], wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The exits to cut at: ``wanted`` and always the last one; without ``wanted`` all.

    Raises PlanError for a layer without an exit.
    """
    if wanted is None:
        return tuple(exits)
    for layer in wanted:
        if layer not in exits:
            raise PlanError(f"exits: this model has no exit after layer {layer}; it has {', '.join(map(str, exits))}")
    return tuple(sorted({*wanted, exits[-1]}))
