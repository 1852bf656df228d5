"""MatLM: a decoder-only language model of nested layers. Pre-norm, rotary positions, no biases, norms without weights.

Every parameter is in a matrix, so the parameter counts are exactly those that the paper's configurations follow:
``L * (4 d^2 + 2 d m)`` beside the token embedding (docs/decisions/0009).
Shapes: ``B`` rows, ``S`` tokens, ``H`` hidden, ``A`` heads of size ``D``, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import functional

from .attention import NestedAttention, Positions
from .config import MatformerConfig
from .nested_ffn import NestedFFN
from .per_layer import one_per_layer

ROTARY_BASE = 10_000.0


class MatformerLM(torch.nn.Module):
    """Token ids to the logits of the next token, at every position.

    Weights are drawn as GPT-2's are (normal, 0.02; what closes a residual branch divided by ``sqrt(2 L)``).
    """

    def __init__(self, config: MatformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(Layer(config, width) for width in config.widths)
        self.lm_head = (
            None if config.tie_word_embeddings else torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self._draw_weights()

    def forward(
        self, input_ids: torch.Tensor, widths: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> torch.Tensor:
        """``input_ids`` [B, S] int64 to logits [B, S, V]. Position ``t`` sees positions ``0..t``.

        ``widths`` and ``heads`` run the first so many neurons and heads of each layer, by default all it holds.
        """
        hidden = self.embed_tokens(input_ids)  # [B, S, H]
        mask = causal_mask(input_ids.shape[1], hidden)
        positions = rotary(input_ids.shape[1], self.config.head_dim, hidden.device)
        per_layer = (one_per_layer(values, len(self.layers)) for values in (widths, heads))
        for layer, width, kept in zip(self.layers, *per_layer, strict=True):
            hidden = layer(hidden, mask, positions, width, kept)
        return functional.linear(norm(hidden), (self.lm_head or self.embed_tokens).weight)

    @torch.no_grad()
    def _draw_weights(self) -> None:
        for name, parameter in self.named_parameters():
            closes_branch = name.endswith(("attention.output.weight", "ffn.down.weight"))
            scale = (2 * len(self.layers)) ** -0.5 if closes_branch else 1.0
            torch.nn.init.normal_(parameter, std=0.02 * scale)


class Layer(torch.nn.Module):
    """Attention and FFN, each on the normalised state and added to it."""

    def __init__(self, config: MatformerConfig, width: int) -> None:
        super().__init__()
        self.attention = NestedAttention(config.hidden_size, config.num_attention_heads, config.head_dim, bias=False)
        self.ffn = NestedFFN(config.hidden_size, width, config.activation, bias=False)

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor, positions: Positions, width: int | None, heads: int | None
    ) -> torch.Tensor:
        hidden = hidden + self.attention(norm(hidden), mask, positions, heads)
        updated: torch.Tensor = hidden + self.ffn(norm(hidden), width)
        return updated


def norm(hidden: torch.Tensor) -> torch.Tensor:
    """LayerNorm over the last dimension without weights."""
    return functional.layer_norm(hidden, hidden.shape[-1:])


def causal_mask(length: int, like: torch.Tensor) -> torch.Tensor:
    """``[S, S]``, added to scores: 0 where a query may see a key.

    The lowest finite number and not minus infinity elsewhere, so that no graph needs a guard against NaN.
    """
    place = torch.arange(length, device=like.device)
    return torch.where(place[:, None] >= place[None, :], 0.0, torch.finfo(like.dtype).min).to(like.dtype)


def rotary(length: int, head_dim: int, device: torch.device) -> Positions:
    """Rotary positions ``0..S-1``: the first half of each head is turned against the second half."""
    half = head_dim // 2
    rates = ROTARY_BASE ** -(torch.arange(half, device=device, dtype=torch.float32) / half)  # [D / 2]
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * rates  # [S, D / 2]
    cos, sin = angles.cos(), angles.sin()
    return partial(_turn, cos=torch.cat((cos, cos), -1), sin=torch.cat((-sin, sin), -1))


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [B, A, S, D], turned by the angles of its positions: ``cos`` and signed ``sin`` are [S, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((second, first), dim=-1) * sin.to(x.dtype)
