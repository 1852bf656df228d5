"""A decoder as it generates, and as it shows the keys and values that a cache has of it.

Where the normal form holds, heads share keys and values, and so a cache has one head of each: the engine that keeps it
is traced in that form. Shapes as in model.py, and ``K`` heads of size ``d`` in a cache.
"""

from __future__ import annotations

from typing import Any

import torch

from ...modules.attention import Positions, hidden_beyond
from ...modules.cached_attention import Cache, CachePlaces, cache_places, cached_attention, caches_of
from ...modules.layers import on_same_weights
from .attention import Attend, Attention
from .attention_forms import in_form
from .forms import cached_form


class CachedLM(torch.nn.Module):
    """``model``, in the form of KV-cache engines, with the interface of ``GenerationEntry``; to be traced."""

    def __init__(self, model: Any) -> None:  # MheDecoder
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_at: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        model, new = self.model, cache_places(position_ids)
        present: list[torch.Tensor] = []
        hidden, turn = model.embeddings(input_ids, position_ids), model.turn(position_ids[:, None])
        for layer, before in zip(model.layers, caches_of(past), strict=True):
            hidden = layer(hidden, None, turn, over_cache(before, new, present))
        return (model.logits(hidden[:, logits_at]), *present)


def over_cache(before: Cache, new: CachePlaces, present: list[torch.Tensor]) -> Attend:
    """Attention of new tokens at ``new`` over what the cache has ``before`` them; appends to ``present`` the keys and
    values that it has with them."""

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        found, after = cached_attention(query, Cache(key, value), before, new, scale)
        present.extend(after)
        return found.transpose(1, 2)

    return attend


class RecordedLM(torch.nn.Module):
    """One pass of ``model``, in the form that it has, over whole texts."""

    def __init__(self, model: Any) -> None:  # MheDecoder
        super().__init__()
        self.model = on_same_weights(model)
        for layer in self.model.layers:
            layer.attention = Recording(layer.attention)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [B, S] to logits [B, S, V], and per layer keys and values [B, K, S, d]."""
        logits = self.model(input_ids)
        return (logits, *(tensor for layer in self.model.layers for tensor in layer.attention.last))


class Recording(torch.nn.Module):
    """``attention``, which keeps in ``last`` the keys and values that a cache would get of its last pass."""

    def __init__(self, attention: Any) -> None:  # Attention, or in a form of its own
        super().__init__()
        self.attention = attention
        self.cached = as_cached(attention)
        self.last: tuple[torch.Tensor, ...] = ()

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, turn: Positions | None, attend: None
    ) -> torch.Tensor:
        self.last = self.cached.kept(hidden, turn)
        updated: torch.Tensor = self.attention(hidden, mask, turn, attend)
        return updated


def as_cached(attention: Any) -> Any:  # Attention, or in a form of its own
    """Module of the cached keys and values of ``attention``: of the literal one, its form in those."""
    return in_form(attention, cached_form(attention.config)) if isinstance(attention, Attention) else attention


class SourceEncoder(torch.nn.Module):
    """``model`` up to what its decoder reads of a text, with the interface of ``EncoderEntry``."""

    def __init__(self, model: Any) -> None:  # MheEncoderDecoder
        super().__init__()
        self.model = model
        self.made_by = torch.nn.ModuleList(as_cached(layer.cross_attention) for layer in model.decoder.layers)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [1, N] to keys [1, K, d, N] and values [1, K, N, d] of each layer of the decoder in turn."""
        source, found = self.model.encode(input_ids, None), list[torch.Tensor]()
        attention: Any
        for attention in self.made_by:
            key, value = attention.kept(source)
            found += [key.transpose(2, 3), value]
        return tuple(found)


class CachedDecoder(torch.nn.Module):
    """The decoder of ``model``, in the form of KV-cache engines, with the interface of ``GenerationEntry``; to
    be traced."""

    def __init__(self, model: Any) -> None:  # MheEncoderDecoder
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_at: torch.Tensor,
        source_lengths: torch.Tensor,
        *kept: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        model, new, present = self.model, cache_places(position_ids), list[torch.Tensor]()
        layers = model.decoder.layers
        sources, past = kept[: 2 * len(layers)], caches_of(kept[2 * len(layers) :])
        mask = hidden_beyond(source_lengths, sources[0].shape[3])
        hidden = model.embeddings(input_ids, position_ids)
        for number, layer in enumerate(layers):
            keys, values = sources[2 * number : 2 * number + 2]
            hidden = layer(hidden, None, (keys.transpose(2, 3), values), mask, over_cache(past[number], new, present))
        return (model.logits(hidden[:, logits_at]), *present)


class RecordedPair(torch.nn.Module):
    """One pass of ``model``, in the forms that it has, over whole texts."""

    def __init__(self, model: Any) -> None:  # MheEncoderDecoder
        super().__init__()
        self.model = on_same_weights(model)
        for layer in self.model.decoder.layers:
            layer.attention = Recording(layer.attention)

    def forward(self, input_ids: torch.Tensor, source_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The decoder's ``input_ids`` [B, S] behind ``source_ids`` [B, N] to logits [B, S, V], and per layer the keys
        and values [B, K, S, d] of these tokens."""
        logits = self.model(source_ids, torch.ones_like(source_ids), input_ids)
        return (logits, *(tensor for layer in self.model.decoder.layers for tensor in layer.attention.last))
