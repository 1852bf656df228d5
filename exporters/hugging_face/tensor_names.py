"""Which tensor of the weight files is which parameter of the module, as transformers decides it (no torch here).

Files may hold the base model's names with its prefix or without, whatever class ``config.json`` names: a classifier
made from a bare encoder, an encoder read from a language model's folder. They may also hold older names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...errors import CheckpointError
from ..checkpoints.checkpoint import Checkpoint

# What to replace in a name, and by what; in this order.
Renamings = Sequence[tuple[str, str]]
# Of TensorFlow's days; bert-base-uncased is still published so.
_LEGACY_RENAMINGS: Renamings = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


def parameter_names(
    checkpoint: Checkpoint, parameters: Collection[str], prefix: str, renamed: Renamings = ()
) -> dict[str, str]:
    """Parameter to tensor, for every tensor of the files; those without a place keep their own name (renamed).

    ``parameters`` are the module's; ``prefix`` is the attribute under which its class keeps the base model.
    Raises CheckpointError where two tensors are the same parameter.
    """
    found: dict[str, str] = {}
    for name in checkpoint.tensors:
        parameter = _placed(_renamed(name, renamed), parameters, f"{prefix}.")
        if parameter in found:
            raise CheckpointError(
                f"{checkpoint.folder}: tensors {found[parameter]!r:.200} and {name!r:.200} are both parameter "
                f"{parameter}; keep one of them"
            )
        found[parameter] = name
    return found


def _renamed(name: str, renamed: Renamings) -> str:
    for old, new in (*_LEGACY_RENAMINGS, *renamed):
        name = name.replace(old, new)
    return name


def _placed(name: str, parameters: Collection[str], prefix: str) -> str:
    if name.startswith(prefix) and name.removeprefix(prefix) in parameters:
        return name.removeprefix(prefix)
    return f"{prefix}{name}" if f"{prefix}{name}" in parameters else name
