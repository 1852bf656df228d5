"""A published slice: a folder that claims to be a submodel of another checkpoint, with widths of its own in each layer.

Nested training makes every level a prefix of the next. A folder that was fine-tuned afterwards, or whose neurons were
put in another order, is a model of its own: its answers cannot come from a view of the universal model's weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from ..elastic import Submodel
from ..errors import CheckpointError, PlanError
from .sentence_transformers.read_modules import HEAD, name_in_file
from .source import ModelSource, open_source

if TYPE_CHECKING:  # plans are made without torch, unless of slices
    import torch

# Keys in which a slice may differ: widths, which are compared as axes; how training went; names and versions.
_KEYS_THAT_MAY_DIFFER = frozenset(
    [
        *("intermediate_size", "n_inner", "d_ff", "num_hidden_layers", "nested", "granularities"),
        *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"),
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
    try:
        submodel = source.spec.submodel({axis.name: axis.size for axis in claimed.spec.axes})
    except PlanError as failure:
        raise CheckpointError(f"{folder}: {failure}; it is no slice of {source.name}") from failure
    _compare_names(source, claimed, submodel, folder)
    _compare_configs(source, claimed, folder)
    for name in claimed.shapes:
        _compare_tensor(source, claimed, submodel, name)
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


def _compare_tensor(source: ModelSource, claimed: ModelSource, submodel: Submodel, name: str) -> None:
    import torch

    cuts, where = source.spec.slices_of(name), f"{claimed.checkpoint.folder}: tensor {name}"
    (expected, stored), (found, own) = _tensor(source, name), _tensor(claimed, name)
    for cut in cuts:
        expected = expected.narrow(cut.dim, 0, submodel[cut.axis] * cut.unit)
    if own != stored:
        raise CheckpointError(f"{where} is stored as {own}, that of {source.name} as {stored}; a slice shares its bits")
    if torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (found, expected))):
        return
    if cuts:
        kept = ", ".join(f"{cut.axis} {submodel[cut.axis]}" for cut in cuts)
        differs = f"is not the first part ({kept}) of {source.name}'s"
    else:
        differs = f"differs from {source.name}'s, which submodels share whole"
    raise CheckpointError(f"{where} {differs}: the levels are not nested; compile it as a model of its own")


def _tensor(source: ModelSource, parameter: str) -> tuple[torch.Tensor, str]:
    """``parameter`` as it is stored, and how. Raises CheckpointError unless the files hold it in its shape."""
    checkpoint, modules = source.checkpoint, source.modules
    place = source.architecture.place_in_files(parameter, source.shapes[parameter])
    header = {**checkpoint.tensors, **(modules.headers if modules else {})}.get(place.tensor)
    if header is None or header.shape != place.shape:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {parameter} is not stored as the model has it, so it cannot be compared with "
            "a slice; save the model as it is loaded"
        )
    name = name_in_file(parameter) if parameter.startswith(HEAD) else place.tensor
    with safe_open(checkpoint.folder / header.file, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    part = tensor[place.rows] if place.is_part else tensor
    return part.T if place.transposed else part, header.dtype
