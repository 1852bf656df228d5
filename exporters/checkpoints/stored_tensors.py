"""Holds the tensors of a checkpoint against the parameters that its configuration describes (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...errors import CheckpointError
from .checkpoint import Checkpoint

_READABLE_DTYPES = ("F64", "F32", "F16", "BF16")


def compare_with_headers(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str] | None = None,
    unused: Callable[[str], object] = lambda _: False,
) -> None:
    """Raises CheckpointError unless the files hold exactly the parameters of ``shapes``, as floating-point numbers.

    ``names`` maps a parameter to its tensor, for every tensor of the files; by default they are called alike.
    Parameters that ``unused`` names may be there too: published files carry them for other classes of the model.
    """
    names = {name: name for name in checkpoint.tensors} if names is None else names
    for parameter, shape in shapes.items():
        if parameter not in names:
            raise CheckpointError(f"{checkpoint.folder}: tensor {parameter} is missing from the weights")
        name = names[parameter]
        header = checkpoint.tensors[name]
        if header.shape != tuple(shape):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name} has shape {list(header.shape)}; expected {list(shape)} as "
                "config.json says"
            )
        if header.dtype not in _READABLE_DTYPES:
            raise CheckpointError(f"{checkpoint.folder}: tensor {name} holds {header.dtype}; expected F32, F16 or BF16")
    for parameter in sorted(names.keys() - shapes.keys()):
        if not unused(parameter):  # it would be passed over in silence
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {names[parameter]!r:.200} has no place in the model that config.json "
                "describes"
            )
