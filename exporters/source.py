"""The source model as the planner sees it: axes, sizes and workload, known from headers alone (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

from ..elastic import BITS, DEPTH, Axis, Bucket, ElasticSpec, Submodel
from ..errors import CheckpointError, PlanError
from ..profiles.precision import Precision, precision_of, widths_of
from ..workload import Op
from .checkpoint import Checkpoint, open_checkpoint
from .exits import Exits, chosen_exits
from .family import Family, Signature, family_of
from .parameter_groups import ParameterGroups, parameter_groups
from .presets import PREFIX, preset_checkpoint

# Whatever the checkpoint's storage type; of int4 4 bits, and a scale for every 32 weights.
_BYTES_PER_WEIGHT: Mapping[Precision, float] = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "int8": 1,
    "int8-dynamic": 1,
    "int4": 0.5 + 4 / 32,
}


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint with the family that reads it; ``cut_at`` are the layers whose exits are used, None is all.

    ``precisions`` are those that its engines get; where there are several, they are one more axis of its submodels.
    """

    checkpoint: Checkpoint
    family: Family
    shapes: Mapping[str, tuple[int, ...]]  # of every parameter of the universal model, by name
    cut_at: tuple[int, ...] | None = None
    precisions: tuple[Precision, ...] = ("fp32",)

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @cached_property
    def spec(self) -> ElasticSpec:
        widths, spec = widths_of(self.precisions), self._cut_spec
        return replace(spec, axes=(*spec.axes, Axis(BITS, widths[-1], widths))) if widths else spec

    @cached_property
    def _cut_spec(self) -> ElasticSpec:
        """The family's spec, with the exits that are used."""
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

    def precision(self, submodel: Submodel) -> Precision:
        """The precision of engines of ``submodel``."""
        return precision_of(submodel, self.precisions)

    def weight_bytes(self, submodel: Submodel, small_tables: bool = True) -> int:
        """Bytes of the weights of ``submodel`` as an engine holds them; in other precisions than fp32 an estimate.

        ``small_tables``: integers stand for the tables of tokens and positions too, as they do on a CPU.
        """
        precision = self.precision(submodel)
        full, least = _BYTES_PER_WEIGHT["fp32"], _BYTES_PER_WEIGHT[precision]
        half = precision in ("fp16", "bf16")
        total = 0.0
        for name, shape in self.shapes.items():
            if self.spec.has(name, submodel):
                wide = not half and (len(shape) < 2 or (not small_tables and self.family.is_embedding(name, shape)))
                total += prod(self.spec.shape_of(name, shape, submodel)) * (full if wide else least)
        return round(total)

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


def open_source(
    folder: Path | str, exits: Sequence[int] | None = None, precisions: tuple[Precision, ...] = ("fp32",)
) -> ModelSource:
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
    return ModelSource(checkpoint, family, family.parameter_shapes(checkpoint), cut_at, precisions)
