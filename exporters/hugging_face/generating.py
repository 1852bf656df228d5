"""Decoders of transformers as they generate with a KV cache, and as they show the keys and values that they keep.

Their classes call attention by a name in their configuration, with queries and keys already turned to their positions.
Shapes: ``B`` rows, ``S`` new tokens, ``A`` heads of size ``D``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...bundle.entries.generation_entry import CachedLayer, window_of
from ..checkpoints.config import offline_transformers
from ..modules.cached_attention import (
    Cache,
    CachePlaces,
    cache_places,
    cached_attention,
    caches_of,
    places_in_window,
    reading_attention,
)

_NAME = "nestforge"
# Attention of every layer while a pass lasts, by query, key, value and the keywords of its class.
_attending: list[Callable[..., torch.Tensor]] = []


class CachedDecoder(torch.nn.Module):
    """``model``, a class with a head over the vocabulary, with the interface of ``GenerationEntry``; to be traced.
    ``layers`` are those that have keys and values of their own."""

    def __init__(self, model: Any, layers: Sequence[CachedLayer]) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_at: torch.Tensor, *kept: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """``kept``: where layers have a window the places of new tokens in their buffers, and the cache."""
        in_text = in_window = cache_places(position_ids)
        if window_of(self.layers) is not None:
            in_window, kept = places_in_window(kept[0], input_ids.shape[1]), kept[1:]
        given = caches_of(kept)
        present: list[tuple[torch.Tensor, Cache, CachePlaces]] = []  # keys of new tokens, the cache with them, at

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
            bent = (how["scaling"], how.get("softcap"), how.get("sliding_window"))
            for own, cache, places in present:
                if own is key:  # those of an earlier layer, which has written them
                    return reading_attention(query, cache, places, *bent)
            number = len(present)
            places = in_text if self.layers[number].window is None else in_window
            found, after = cached_attention(query, Cache(key, value), given[number], places, *bent)
            present.append((key, after, places))
            return found

        with _attention(self.model, attend):
            answer = self.model(input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_at)
        return (answer.logits, *(tensor for _, cache, _ in present for tensor in cache))


class RecordedDecoder(torch.nn.Module):
    """One pass of ``model`` over whole texts, as transformers makes it; ``layers`` as of CachedDecoder."""

    def __init__(self, model: Any, layers: Sequence[CachedLayer]) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [B, S] to logits [B, S, V], and keys and values [B, heads, S, size] of each layer that has its
        own; of one with a window those of the last tokens that it sees."""
        cache = offline_transformers().DynamicCache()  # without a configuration: every layer keeps every token
        answer = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        kept = [
            tensor if own.window is None else tensor[:, :, -own.window :]
            for own, layer in zip(self.layers, cache.layers, strict=True)
            for tensor in (layer.keys, layer.values)
        ]
        return (answer.logits, *kept)


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
    """The function that transformers calls: ``[B, A, S, D]`` and ``[B, K, S, D]`` to ``[B, S, A, D]``."""
    return _attending[-1](query, key, value, how), None
