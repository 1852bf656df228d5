"""The source model as the planner sees it: axes, sizes and workload, known from headers alone (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from ..elastic import Bucket, ElasticSpec, Submodel
from ..workload import Op
from .checkpoint import Checkpoint, open_checkpoint
from .family import Family, Signature, family_of

# Engines hold float32 weights whatever the checkpoint's storage type.
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint together with the family that reads it."""

    checkpoint: Checkpoint
    family: Family
    shapes: Mapping[str, tuple[int, ...]]  # of every parameter of the universal model, by name

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @cached_property
    def spec(self) -> ElasticSpec:
        return self.family.describe(self.checkpoint)

    @cached_property
    def signature(self) -> Signature:
        return self.family.signature(self.checkpoint)

    def parameters(self, submodel: Submodel) -> int:
        """Number of parameters of ``submodel``."""
        return sum(prod(self.spec.shape_of(name, shape, submodel)) for name, shape in self.shapes.items())

    def weight_bytes(self, submodel: Submodel) -> int:
        """Bytes of the weights of ``submodel`` as an engine holds them."""
        return self.parameters(submodel) * BYTES_PER_PARAMETER

    def workload(self, submodel: Submodel, bucket: Bucket) -> list[Op]:
        """The operations of one forward pass of ``submodel`` at ``bucket``."""
        return self.family.workload(self.checkpoint, submodel, bucket)


def open_source(folder: Path | str) -> ModelSource:
    """Opens a model folder. Raises CheckpointError or UnsupportedModelError."""
    checkpoint = open_checkpoint(Path(folder))
    family = family_of(checkpoint)
    return ModelSource(checkpoint, family, family.parameter_shapes(checkpoint))
