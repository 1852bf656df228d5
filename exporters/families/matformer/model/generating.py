"""MatLM as it generates, and as it shows the keys and values that its attention has.

Shapes as in language_model.py, and ``C`` tokens of a cache's capacity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ....modules.attention import rotary
from ....modules.cached_attention import Cache, cache_places, cached_attention, caches_of, tokens_so_far
from .language_model import Places, places_of
from .relative_bias import buckets_between


class CachedLM(torch.nn.Module):
    """``model`` with the interface of ``GenerationEntry``; to be traced."""

    def __init__(self, model: Any) -> None:  # MatformerLM
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_at: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        model, size = self.model, self.model.config.head_dim
        new = cache_places(position_ids)
        if model.config.position == "rotary":
            places = Places(None, rotary(position_ids[:, None], size), None)
        else:
            places = Places(None, None, buckets_between(position_ids, tokens_so_far(new)))
        present: list[torch.Tensor] = []
        hidden = model.embed_tokens(input_ids)  # [B, S, H]
        for layer, before in zip(model.layers, caches_of(past), strict=True):

            def attend(
                query: torch.Tensor,
                key: torch.Tensor,
                value: torch.Tensor,
                mask: torch.Tensor | None,
                before: Cache = before,
            ) -> torch.Tensor:
                bias = None if mask is None else mask.transpose(0, 1)  # [B, A, S, T]
                found, after = cached_attention(query, Cache(key, value), before, new, size**-0.5, bias=bias)
                present.extend(after)
                return found.transpose(1, 2)

            hidden = layer(hidden, places, attend=attend)
        hidden = model.norm(hidden[:, logits_at])  # [B, answers, H]
        return (model.lm_head(hidden, model.embed_tokens.weight), *present)


class RecordedLM(torch.nn.Module):
    """One pass of ``model`` over whole texts."""

    def __init__(self, model: Any) -> None:  # MatformerLM
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``input_ids`` [B, S] to logits [B, S, V], and per layer keys and values [B, A, S, D]."""
        model, kept = self.model, list[torch.Tensor]()
        hidden = model.embed_tokens(input_ids)
        places = places_of(model.config, input_ids.shape[1], hidden)

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
        ) -> torch.Tensor:
            kept.extend((key, value))
            return functional.scaled_dot_product_attention(query, key, value, mask, scale=model.config.head_dim**-0.5)

        for layer in model.layers:
            hidden = layer(hidden, places, attend=attend)
        return (model.lm_head(model.norm(hidden), model.embed_tokens.weight), *kept)
