"""Decoders of transformers as they generate, and as they show the keys and values that they keep.

Their classes call attention by a name in their configuration, with queries and keys already turned to their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..checkpoints.offline_transformers import offline_transformers
from ..modules.cached_attention import Cache, cache_places, cached_attention, caches_of, reading_attention

_NAME = "nestforge"
# What attention of every layer is while a pass lasts, by query, key, value and the keywords of its class.
_attending: list[Callable[..., torch.Tensor]] = []


class CachedDecoder(torch.nn.Module):
    """``model``, a class with a head over the vocabulary, with the interface of ``GenerationEntry``; to be traced."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_at: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        places, given = cache_places(position_ids), caches_of(past)
        present: list[tuple[torch.Tensor, Cache]] = []  # keys of new tokens, and the cache with them

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
            bent = (how["scaling"], how.get("softcap"), how.get("sliding_window"))
            for own, cache in present:
                if own is key:  # those of an earlier layer, which has written them
                    return reading_attention(query, cache, places, *bent)
            found, after = cached_attention(query, Cache(key, value), given[len(present)], places, *bent)
            present.append((key, after))
            return found

        with _attention(self.model, attend):
            answer = self.model(input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_at)
        return (answer.logits, *(tensor for _, cache in present for tensor in cache))


class RecordedDecoder(torch.nn.Module):
    """One pass of ``model`` over whole texts, as transformers makes it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [B, S] to logits [B, S, V], and keys and values [B, heads, S, size] of each layer that has its
        own."""
        cache = offline_transformers().DynamicCache()  # without a configuration: every layer keeps every token
        answer = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        return (answer.logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values)))


@contextmanager
def _attention(model: Any, attend: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Within it attention of every layer of ``model`` is ``attend``, and no mask is made."""
    offline_transformers().AttentionInterface.register(_NAME, _attend)
    config, own = model.config, model.config._attn_implementation
    config._attn_implementation = _NAME
    _attending.append(attend)
    try:
        yield
    finally:
        _attending.pop()
        config._attn_implementation = own


def _attend(
    _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **how: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls: ``[B, A, S, D]`` and ``[B, K, S, D]`` to ``[B, S, A, D]``."""
    return _attending[-1](query, key, value, how), None
