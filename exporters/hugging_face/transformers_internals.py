"""Names of transformers that are not public, for 5.23 (pyproject.toml pins it): it has no public ones of the same.

Attention is exchanged in a model that exists, and for one trace alone; ``set_attn_implementation`` asks a class whether
it would allow that. No other module uses a private name of transformers, which a test holds.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

import torch

from ...errors import CheckpointError
from ...outside import library_errors
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import offline_transformers

# The method of attention of T5's kin by which distances have buckets.
DISTANCE_BUCKETS = "_relative_position_bucket"
# The method of classes by which a decoder begins with tokens of language and task.
_INIT_TOKENS = "_retrieve_init_tokens"
_ATTENTION = "_attn_implementation"
_DETECTED = -1


def has_attention(config: Any) -> bool:
    """Whether ``config`` names an attention."""
    return hasattr(config, _ATTENTION)


def attention_of(config: Any) -> str:
    """The name of the attention that a model of ``config`` runs."""
    name: str = getattr(config, _ATTENTION)
    return name


def set_attention(config: Any, name: str) -> None:
    """A model of ``config`` runs the attention ``name`` from now on."""
    setattr(config, _ATTENTION, name)


def masks_by_attention() -> MutableMapping[str, Callable[..., Any]]:
    """The functions that make masks, by the name of their attention: one that is registered cannot be taken back."""
    masks: MutableMapping[str, Callable[..., Any]] = offline_transformers().AttentionMaskInterface._global_mapping
    return masks


def set_experts(config: Any, name: str) -> None:
    """A model that is made of ``config`` computes its experts in the way ``name``."""
    config._experts_implementation = name


def first_tokens(checkpoint: Checkpoint, model: Any, start: int, vocabulary: int) -> tuple[int, ...] | None:
    """The tokens of language, task and timestamps behind ``start``, and that one, by the rules of ``model``'s class
    and the settings of its folder; none where transformers would detect the language in what is heard. None where a
    decoder begins with ``start`` alone. Raises CheckpointError for settings that make no sense."""
    if not hasattr(type(model), _INIT_TOKENS):
        return None
    config = offline_transformers().GenerationConfig
    file = checkpoint.folder / "generation_config.json"
    with library_errors(lambda why: CheckpointError(f"{checkpoint.folder}: tokens of language and task: {why}")):
        stated = config.from_pretrained(checkpoint.folder) if file.is_file() else config.from_model_config(model.config)
        stated.decoder_start_token_id, stated.return_timestamps = start, False
        detecting = SimpleNamespace(device="cpu", detect_language=lambda **_: torch.tensor([_DETECTED]))
        found = getattr(type(model), _INIT_TOKENS)(detecting, torch.zeros(1), 1, stated, model.config, 1, {})
    ids = tuple(found[0].tolist())
    if max(ids) >= vocabulary:
        raise CheckpointError(
            f"{checkpoint.folder}: its decoder begins with tokens {list(ids)}, beyond its vocabulary of {vocabulary}"
        )
    return () if _DETECTED in ids else ids if len(ids) > 1 else None
