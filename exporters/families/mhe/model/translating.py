"""A translation model as it generates: an encoder that makes the decoder's keys and values of a text, once, and a
decoder that keeps its own.

Where heads share keys and values, so they do of the text that is read: ``2 d`` numbers for each of its tokens and each
layer of the decoder. Shapes as in encoder_decoder.py, and ``K`` heads of size ``d`` in a cache.
"""

from __future__ import annotations

from typing import Any

import torch

from ....modules.attention import hidden_beyond
from ....modules.cached_attention import cache_places, caches_of
from .generating import Recording, as_cached, over_cache
from .lower import copied


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
    """The decoder of ``model``, in the form of engines that keep a cache, with the interface of ``GenerationEntry``; to
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
        self.model = copied(model)
        for layer in self.model.decoder.layers:
            layer.attention = Recording(layer.attention)

    def forward(self, input_ids: torch.Tensor, source_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The decoder's ``input_ids`` [B, S] behind ``source_ids`` [B, N] to logits [B, S, V], and per layer the keys
        and values [B, K, S, d] of these tokens."""
        logits = self.model(source_ids, torch.ones_like(source_ids), input_ids)
        return (logits, *(tensor for layer in self.model.decoder.layers for tensor in layer.attention.last))
