"""Parts of a model that get engines of their own: the layers between two exits, or a decoder with a KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ..bucket import Bucket
from ..bundle.entries.engine_entry import RoutingEntry
from ..bundle.entries.exits_entry import ExitsEntry
from ..bundle.entries.tensor_spec import TensorSpec
from ..elastic import Submodel
from ..errors import PlanError
from ..workload import Op

if TYPE_CHECKING:  # plans are made without torch
    import torch


@dataclass(frozen=True, eq=False)
class Part:
    """``name`` is what engines of it have as their ``segment``; submodels of less than ``min_depth`` layers lack it.
    Its engines have ``bucket`` in the place of the profile's, if that is stated.

    ``module(module)`` is the part of what ``Architecture.load`` returned, perhaps narrowed, on its weights: ``forward``
    takes the ``inputs`` by position and returns the ``outputs`` as a tuple; the user's module is attribute ``model``.
    Where the model is traced in ``variants`` of ``Architecture.variants``, it is given in those for that. ``axes`` with
    choices are those that change its graph; ``routes(submodel)`` are what it returns after its outputs once it is
    traced. ``elastic`` says by which axes dimensions of its inputs and outputs shrink, by their names.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    workload: Callable[[Submodel, Bucket], Sequence[Op]]
    module: Callable[[torch.nn.Module], torch.nn.Module]
    min_depth: int = 0
    bucket: Bucket | None = None
    variants: Mapping[str, str] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    routes: Callable[[Submodel], tuple[RoutingEntry, ...]] = lambda _: ()
    elastic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    def structure(self, submodel: Submodel) -> tuple[tuple[str, int], ...]:
        """The part of ``submodel``'s structure that changes its graph."""
        return tuple((axis, value) for axis, value in submodel.structure if axis in self.axes)

    def of(self, submodel: Submodel) -> Part:
        """This with inputs and outputs as ``submodel`` has them."""

        def cut(spec: TensorSpec) -> TensorSpec:
            axes = self.elastic.get(spec.name, {})
            return replace(spec, dims=tuple(submodel[axes[at]] if at in axes else n for at, n in enumerate(spec.dims)))

        if not self.elastic:
            return self
        return replace(self, inputs=tuple(map(cut, self.inputs)), outputs=tuple(map(cut, self.outputs)))

    def at(self, bucket: Bucket) -> Bucket:
        """The bucket that its engines have in the place of ``bucket``."""
        return self.bucket or bucket


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
