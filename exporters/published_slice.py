"""A published slice: a folder that claims to be a submodel of another checkpoint, with widths of its own in each layer.

Nested training makes every level a prefix of the next. A folder that was fine-tuned afterwards, or whose neurons were
put in another order, is a model of its own: its answers cannot come from a view of the universal model's weights.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..elastic import ElasticSpec, Submodel
from ..errors import CheckpointError, PlanError
from .checkpoint import Checkpoint
from .source import ModelSource, open_source

_NOT_NESTED = "the levels are not nested"


def read_slice(source: ModelSource, folder: Path) -> Submodel:
    """The submodel of ``source`` that the checkpoint in ``folder`` holds.

    Every sliced tensor must equal, bit by bit, the first part of the universal model's, and every other tensor the
    whole of it. Raises CheckpointError naming the first tensor that does not, or the layer whose width is impossible.
    """
    claimed = open_source(folder)
    for checkpoint in (source.checkpoint, claimed.checkpoint):
        checkpoint.require_weights()
    if claimed.family is not source.family:
        raise CheckpointError(
            f"{folder}: a slice of {source.name} must be of family {source.family.name}, got {claimed.family.name}"
        )
    submodel = _claimed_submodel(source, claimed.spec, folder)
    _compare_names(source, claimed, submodel, folder)
    with ExitStack() as stack:
        whole, part = (_Tensors(checkpoint, stack) for checkpoint in (source.checkpoint, claimed.checkpoint))
        for name in claimed.shapes:
            _compare_tensor(source.spec, submodel, name, whole, part)
    return submodel


def _claimed_submodel(source: ModelSource, claimed: ElasticSpec, folder: Path) -> Submodel:
    values = {axis.name: axis.size for axis in claimed.axes}
    sizes = {axis.name: axis.size for axis in source.spec.axes}
    for name, value in values.items():
        if name not in sizes:
            raise CheckpointError(f"{folder}: it has {name}, which {source.name} has not; it is no slice of it")
        if value > sizes[name]:
            raise CheckpointError(
                f"{folder}: {name} is {value} wide, more than the {sizes[name]} of {source.name}; it is no slice of it"
            )
    try:
        submodel = source.spec.submodel(values)
    except PlanError as failure:
        raise CheckpointError(f"{folder}: {failure}") from failure
    for axis in source.spec.axes:
        behind = submodel.depth is not None and axis.layer is not None and axis.layer >= submodel.depth
        if axis.name not in values and not behind:
            raise CheckpointError(f"{folder}: {axis.name} of {source.name} is missing; it is no slice of it")
    return submodel


def _compare_names(source: ModelSource, claimed: ModelSource, submodel: Submodel, folder: Path) -> None:
    expected = {
        name: source.spec.shape_of(name, shape, submodel)
        for name, shape in source.shapes.items()
        if source.spec.has(name, submodel)
    }
    for name in sorted(expected.keys() ^ claimed.shapes.keys()):
        problem = "is missing" if name in expected else f"has no place in {source.name}"
        raise CheckpointError(f"{folder}: tensor {name} {problem}; it is no slice of {source.name}")
    for name, shape in claimed.shapes.items():
        if tuple(shape) != expected[name]:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(shape)}; expected {list(expected[name])} of {source.name}"
            )


def _compare_tensor(spec: ElasticSpec, submodel: Submodel, name: str, whole: _Tensors, part: _Tensors) -> None:
    found, place = part.read(name), [slice(None)] * len(part.checkpoint.tensors[name].shape)
    for cut in spec.slices_of(name):
        place[cut.dim] = slice(0, submodel[cut.axis] * cut.unit)
    expected = whole.read(name, tuple(place))
    where = f"{part.checkpoint.folder}: tensor {name}"
    if found.dtype != expected.dtype:
        raise CheckpointError(
            f"{where} is stored as {part.checkpoint.tensors[name].dtype}, that of {whole.checkpoint.name} as "
            f"{whole.checkpoint.tensors[name].dtype}; a slice shares its bits"
        )
    if torch.equal(_bits(found), _bits(expected)):
        return
    cuts = spec.slices_of(name)
    if cuts:
        kept = ", ".join(f"{cut.axis} {submodel[cut.axis]}" for cut in cuts)
        raise CheckpointError(
            f"{where} is not the first part ({kept}) of {whole.checkpoint.name}'s: {_NOT_NESTED}; "
            "compile it as a model of its own"
        )
    raise CheckpointError(
        f"{where} differs from {whole.checkpoint.name}'s, which submodels share whole: {_NOT_NESTED}; "
        "compile it as a model of its own"
    )


class _Tensors:
    """Tensors of a checkpoint, read one at a time; its files stay open as long as ``stack``."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self.checkpoint = checkpoint
        self._files: dict[str, Any] = {}
        self._stack = stack

    def read(self, name: str, place: tuple[slice, ...] | None = None) -> torch.Tensor:
        header = self.checkpoint.tensors[name]
        if header.file not in self._files:
            path = self.checkpoint.folder / header.file
            self._files[header.file] = self._stack.enter_context(safe_open(path, framework="pt"))
        file = self._files[header.file]
        tensor: torch.Tensor = file.get_slice(name)[place] if place else file.get_tensor(name)
        return tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
