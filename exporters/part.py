"""Some of a model as an engine of its own: the layers between two exits, or a decoder that keeps keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..bucket import Bucket
from ..bundle.entries.engine_entry import RoutingEntry
from ..bundle.entries.tensor_spec import TensorSpec
from ..elastic import Submodel
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
        """What of the structure of ``submodel`` changes its graph."""
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
