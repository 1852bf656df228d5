"""The source model as the planner sees it: axes, sizes and workload, known from headers alone (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

from ..elastic import DEPTH, Bucket, ElasticSpec, Submodel
from ..errors import CheckpointError, PlanError
from ..workload import Op
from .checkpoint import Checkpoint, open_checkpoint
from .exits import Exits, chosen_exits
from .family import Family, Signature, family_of
from .parameter_groups import ParameterGroups, parameter_groups
from .presets import PREFIX, preset_checkpoint

# Engines hold float32 weights whatever the checkpoint's storage type.
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint with the family that reads it; ``cut_at`` are the layers whose exits are used, None is all."""

    checkpoint: Checkpoint
    family: Family
    shapes: Mapping[str, tuple[int, ...]]  # of every parameter of the universal model, by name
    cut_at: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @cached_property
    def spec(self) -> ElasticSpec:
        spec = self.family.describe(self.checkpoint)
        if self.cut_at is None:
            return spec
        if DEPTH not in spec.kinds:
            raise PlanError(f"{self.checkpoint.folder}: exits {list(self.cut_at)} asked for, but this model has none")
        return replace(
            spec,
            axes=tuple(
                replace(axis, choices=chosen_exits(axis.choices, self.cut_at)) if axis.choices else axis
                for axis in spec.axes
            ),
        )

    @cached_property
    def exits(self) -> Exits | None:
        return self.family.exits(self.checkpoint, self.cut_at)

    @cached_property
    def signature(self) -> Signature:
        return self.family.signature(self.checkpoint)

    def parameters(self, submodel: Submodel) -> int:
        """Number of parameters of ``submodel``."""
        return sum(
            prod(self.spec.shape_of(name, shape, submodel))
            for name, shape in self.shapes.items()
            if self.spec.has(name, submodel)
        )

    def parameter_groups(self, submodel: Submodel) -> ParameterGroups:
        """Parameters of ``submodel``: in all, embedding tables, feed-forward."""
        return parameter_groups(self.spec, self.shapes, submodel, self.family.is_embedding)

    def weight_bytes(self, submodel: Submodel) -> int:
        """Bytes of the weights of ``submodel`` as an engine holds them."""
        return self.parameters(submodel) * BYTES_PER_PARAMETER

    def workload(self, submodel: Submodel, bucket: Bucket, forms: Mapping[str, str] | None = None) -> list[Op]:
        """The operations of one forward pass of ``submodel`` at ``bucket``, in ``forms``; of what may have several, the
        first that the family lists where ``forms`` leaves it out."""
        offered = self.forms(submodel, bucket)
        chosen = {computed: next(iter(options)) for computed, options in offered.items()} | dict(forms or {})
        ops = self.family.workload(self.checkpoint, submodel, bucket)
        return [*ops, *(op for computed, options in offered.items() for op in options[chosen[computed]])]

    def forms(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, Mapping[str, Sequence[Op]]]:
        """What an engine may compute in several equal forms, to form, to its operations."""
        return self.family.forms(self.checkpoint, submodel, bucket)


def open_source(folder: Path | str, exits: Sequence[int] | None = None) -> ModelSource:
    """Opens a model folder, or ``preset:NAME``; ``exits`` are the layers whose exits are used, by default all.

    A model without weights (a preset, or a folder with ``config.json`` alone) can be described and planned where its
    configuration says everything; what needs the weights then raises CheckpointError.
    Raises CheckpointError or UnsupportedModelError.
    """
    text = str(folder)
    if text.startswith(PREFIX):
        checkpoint = preset_checkpoint(text.removeprefix(PREFIX))
    else:
        checkpoint = open_checkpoint(Path(folder), untrained=True)
    family = family_of(checkpoint)
    if checkpoint.missing is not None and not family.reads_config_alone:
        raise CheckpointError(checkpoint.missing)
    cut_at = None if exits is None else tuple(exits)
    return ModelSource(checkpoint, family, family.parameter_shapes(checkpoint), cut_at)
