"""An ordinary encoder in the words of ``CodaEncoder``, whatever class of transformers it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....checkpoints.checkpoint import Checkpoint
from ....checkpoints.own_folder import stored_tensor

# transformers' names of the activations that layers may have.
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class DenseEncoder:
    """``fields`` of ``CodaConfig``, ``weights`` of ``CodaEncoder`` by its names in float32, and by name what the
    checkpoint has behind the encoder, which is ``left_out``."""

    fields: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    left_out: tuple[str, ...] = ()


def reader(checkpoint: Checkpoint, names: Mapping[str, str], prefix: str = "") -> Callable[[str], torch.Tensor]:
    """Reads a parameter by the name below ``prefix`` that its module gives it; ``names`` are those in files."""
    return lambda parameter: stored_tensor(checkpoint, names[f"{prefix}{parameter}"])


def layer_weights(
    read: Callable[[str], torch.Tensor], at: Sequence[str], parts: Mapping[str, str], kinds: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Every layer's ``kinds`` (weight, bias) of ``parts``, from the name in a layer of ``CodaEncoder`` to that in a
    layer of the checkpoint, of which ``at`` lists where each begins."""
    return {
        f"layers.{layer}.{own}.{kind}": read(f"{start}.{theirs}.{kind}")
        for layer, start in enumerate(at)
        for own, theirs in parts.items()
        for kind in kinds
    }


def activation_named(checkpoint: Checkpoint, key: str, name: object) -> str:
    """The activation that transformers calls ``name``. Raises CheckpointError, which names ``key``, for another."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise checkpoint.misfit(f"{key}: {name!r:.80} is no activation of conditional layers; expected one of {known}")
    return _ACTIVATIONS[name]


def norm_eps(checkpoint: Checkpoint, key: str, default: float) -> float:
    """What the norms add to a variance, ``default`` where config.json does not have ``key``. Raises CheckpointError."""
    value: Any = checkpoint.config.get(key, default)
    if type(value) not in (int, float) or not 0 < value < 1:
        raise checkpoint.misfit(f"{key}: expected a number between 0 and 1, got {value!r:.80}")
    return float(value)
