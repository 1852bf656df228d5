"""Names of transformers that are not public, for 5.23 (pyproject.toml pins it): it has no public ones of the same.

Attention is exchanged in a model that exists, and for one trace alone; ``set_attn_implementation`` asks a class whether
it would allow that. No other module uses a private name of transformers, which a test holds.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from ..checkpoints.config import offline_transformers

# The method of attention of T5's kin by which distances have buckets.
DISTANCE_BUCKETS = "_relative_position_bucket"
# The method of classes by which a decoder begins with tokens of language and task.
INIT_TOKENS = "_retrieve_init_tokens"
_ATTENTION = "_attn_implementation"


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
