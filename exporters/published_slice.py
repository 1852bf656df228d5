"""A published slice: a folder that claims to be a submodel of another checkpoint, with widths of its own in each layer.

Nested training makes every level a prefix of the next. A folder that was fine-tuned afterwards, or whose neurons were
put in another order, is a model of its own: its answers cannot come from a view of the universal model's weights.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from ..elastic import ElasticSpec, Submodel
from ..errors import CheckpointError, PlanError
from .checkpoints.checkpoint import TensorHeader
from .sentence_transformers.read_modules import HEAD, name_in_file
from .source import ModelSource, open_source

if TYPE_CHECKING:  # plans are made without torch, unless of slices
    import torch

_NOT_NESTED_PROBLEM = "the levels are not nested"
# What config.json of a slice may say otherwise: widths, which are compared as axes; how training went; who wrote it.
_KEYS_THAT_MAY_DIFFER = frozenset(
    [
        "intermediate_size",
        "n_inner",
        "d_ff",
        "num_hidden_layers",
        "nested",
        "granularities",
        "_name_or_path",
        "architectures",
        "transformers_version",
        "dtype",
        "torch_dtype",
    ]
)


def read_slice(source: ModelSource, folder: Path) -> Submodel:
    """The submodel of ``source`` that the checkpoint in ``folder`` holds.

    Every sliced tensor must equal, bit by bit, the first part of the universal model's, and every other tensor the
    whole of it; what both ``config.json`` state beside widths must be the same. Raises CheckpointError naming the first
    tensor or key that does not, or the layer whose width is impossible.
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
    _compare_configs(source, claimed, folder)
    with ExitStack() as stack:
        whole, part = _Tensors(source, stack), _Tensors(claimed, stack)
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


def _compare_configs(source: ModelSource, claimed: ModelSource, folder: Path) -> None:
    """Equal weights are another model where, say, the activation or the number of heads that share them differs."""
    free = {*_KEYS_THAT_MAY_DIFFER, "num_attention_heads"} if "heads" in source.spec.kinds else _KEYS_THAT_MAY_DIFFER
    ours, theirs = source.checkpoint.config, claimed.checkpoint.config
    if _behind(source) != _behind(claimed):
        raise CheckpointError(
            f"{folder}: its modules of sentence-transformers are not those of {source.name}; it is no slice of it"
        )
    for key in sorted((ours.keys() & theirs.keys()) - free):
        if ours[key] != theirs[key]:
            raise CheckpointError(
                f"{folder / 'config.json'}: {key[:80]}: expected {ours[key]!r:.80} as {source.name} has, got "
                f"{theirs[key]!r:.80}; it is no slice of it"
            )


def _behind(source: ModelSource) -> object:
    """Computation behind the model."""
    return None if source.modules is None else (dict(source.modules.modules), source.modules.width)


def _compare_tensor(spec: ElasticSpec, submodel: Submodel, name: str, whole: _Tensors, part: _Tensors) -> None:
    import torch

    found = part.read(name)
    place = [slice(None)] * found.ndim
    for cut in spec.slices_of(name):
        place[cut.dim] = slice(0, submodel[cut.axis] * cut.unit)
    expected = whole.read(name, tuple(place))
    where = f"{part.checkpoint.folder}: tensor {name}"
    if found.dtype != expected.dtype:
        raise CheckpointError(
            f"{where} is stored as {part.header(name).dtype}, that of {whole.checkpoint.name} as "
            f"{whole.header(name).dtype}; a slice shares its bits"
        )
    if torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (found, expected))):
        return
    cuts = spec.slices_of(name)
    if cuts:
        kept = ", ".join(f"{cut.axis} {submodel[cut.axis]}" for cut in cuts)
        raise CheckpointError(
            f"{where} is not the first part ({kept}) of {whole.checkpoint.name}'s: {_NOT_NESTED_PROBLEM}; "
            "compile it as a model of its own"
        )
    raise CheckpointError(
        f"{where} differs from {whole.checkpoint.name}'s, which submodels share whole: {_NOT_NESTED_PROBLEM}; "
        "compile it as a model of its own"
    )


class _Tensors:
    """Tensors of a model as they are stored, read one at a time; its files stay open as long as ``stack``."""

    def __init__(self, source: ModelSource, stack: ExitStack) -> None:
        self.checkpoint = source.checkpoint
        self._shapes = source.shapes
        self._place = source.architecture.place_in_files
        self._headers = {**source.checkpoint.tensors, **(source.modules.headers if source.modules else {})}
        self._files: dict[str, Any] = {}
        self._stack = stack

    def header(self, parameter: str) -> TensorHeader:
        """Raises CheckpointError unless the files hold ``parameter`` in its shape."""
        place = self._place(parameter, self._shapes[parameter])
        header = self._headers.get(place.tensor)
        if header is None or header.shape != place.shape:
            raise CheckpointError(
                f"{self.checkpoint.folder}: tensor {parameter} is not stored as the model has it, so it cannot be "
                "compared with a slice; save the model as it is loaded"
            )
        return header

    def read(self, parameter: str, place: tuple[slice, ...] | None = None) -> torch.Tensor:
        header = self.header(parameter)
        if header.file not in self._files:
            path = self.checkpoint.folder / header.file
            self._files[header.file] = self._stack.enter_context(safe_open(path, framework="pt"))
        stored = self._place(parameter, self._shapes[parameter])
        name = name_in_file(parameter) if parameter.startswith(HEAD) else stored.tensor
        file = self._files[header.file]
        if stored.is_part:
            part: torch.Tensor = file.get_slice(name)[stored.rows]
            part = part.T if stored.transposed else part
            return part[place] if place else part
        tensor: torch.Tensor = file.get_slice(name)[place] if place else file.get_tensor(name)
        return tensor
