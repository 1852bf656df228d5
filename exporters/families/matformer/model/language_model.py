"""MatLM: a decoder-only language model of nested layers. Pre-norm; positions, biases and norm weights as configured.

Shapes: ``B`` rows, ``S`` tokens, ``H`` hidden, ``A`` heads of size ``D``, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from ....modules.attention import Attend, NestedAttention, Positions, causal_mask, rotary
from ..architecture.config import MatformerConfig
from .nested_ffn import NestedFFN
from .per_layer import one_per_layer
from .relative_bias import RelativeBias, distance_buckets

# Of every LayerNorm: torch's own.
NORM_EPS = 1e-5


class MatformerLM(torch.nn.Module):
    """Token ids to the logits of the next token, at every position.

    Weights are drawn as GPT-2's are (normal, 0.02; what closes a residual branch divided by ``sqrt(2 L)``; biases 0,
    norms 1).
    """

    def __init__(self, config: MatformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(Layer(config, width) for width in config.widths)
        self.norm = torch.nn.LayerNorm(config.hidden_size, NORM_EPS, elementwise_affine=config.norm_weights)
        self.lm_head = VocabularyHead(config)
        self._draw_weights()

    def forward(
        self, input_ids: torch.Tensor, widths: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> torch.Tensor:
        """``input_ids`` [B, S] int64 to logits [B, S, V]. Position ``t`` sees positions ``0..t``.

        ``widths`` and ``heads`` run the first so many neurons and heads of each layer, by default all it holds.
        """
        hidden = self.embed_tokens(input_ids)  # [B, S, H]
        places = places_of(self.config, input_ids.shape[1], hidden)
        per_layer = (one_per_layer(values, len(self.layers)) for values in (widths, heads))
        for layer, width, kept in zip(self.layers, *per_layer, strict=True):
            hidden = layer(hidden, places, width, kept)
        logits: torch.Tensor = self.lm_head(self.norm(hidden), self.embed_tokens.weight)
        return logits

    @torch.no_grad()
    def _draw_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                continue  # drawn as 1
            if name.endswith(".bias"):
                torch.nn.init.zeros_(parameter)
                continue
            closes_branch = name.endswith(("attention.output.weight", "ffn.down.weight"))
            scale = (2 * len(self.layers)) ** -0.5 if closes_branch else 1.0
            torch.nn.init.normal_(parameter, std=0.02 * scale)


class Layer(torch.nn.Module):
    """Attention and FFN, each on the normalised state and added to it."""

    def __init__(self, config: MatformerConfig, width: int) -> None:
        super().__init__()
        size, heads, weights = config.hidden_size, config.num_attention_heads, config.norm_weights
        self.relative_bias = RelativeBias(heads) if config.position == "relative_bias" else None
        self.attention_norm = torch.nn.LayerNorm(size, NORM_EPS, elementwise_affine=weights)
        self.attention = NestedAttention(size, heads, config.head_dim, config.bias)
        self.ffn_norm = torch.nn.LayerNorm(size, NORM_EPS, elementwise_affine=weights)
        self.ffn = NestedFFN(size, width, config.activation, config.bias)

    def forward(
        self,
        hidden: torch.Tensor,
        places: Places,
        width: int | None = None,
        heads: int | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        mask = places.mask
        if self.relative_bias is not None:
            bias = self.relative_bias(places.buckets, heads)  # [A, S, S]
            mask = bias if mask is None else mask + bias
        hidden = hidden + self.attention(self.attention_norm(hidden), mask, places.turn, heads, attend)
        updated: torch.Tensor = hidden + self.ffn(self.ffn_norm(hidden), width)
        return updated


class VocabularyHead(torch.nn.Module):
    """Logits of every token, through a matrix of its own or, where it is tied, that of the embedding."""

    def __init__(self, config: MatformerConfig) -> None:
        super().__init__()
        shape = (config.vocab_size, config.hidden_size)
        self.weight = None if config.tie_word_embeddings else torch.nn.Parameter(torch.empty(shape))
        self.bias = torch.nn.Parameter(torch.empty(config.vocab_size)) if config.bias else None

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, S, H] and ``embedding`` [V, H] to logits [B, S, V]."""
        return functional.linear(hidden, embedding if self.weight is None else self.weight, self.bias)


class Places(NamedTuple):
    """What attention of every layer knows about places: ``mask`` [S, S] to add to scores; ``turn`` of queries and keys
    by rotary positions; ``buckets`` [S, S] of a relative bias."""

    mask: torch.Tensor | None
    turn: Positions | None
    buckets: torch.Tensor | None


def places_of(config: MatformerConfig, length: int, like: torch.Tensor) -> Places:
    """The places of ``length`` tokens, on the device and in the dtype of ``like``."""
    mask = causal_mask(length, like)
    if config.position == "rotary":
        return Places(mask, rotary(torch.arange(length, device=like.device), config.head_dim), None)
    return Places(mask, None, distance_buckets(length, like.device))
