"""What models are made of beside attention.

Shapes: ``B`` rows, ``S`` tokens, ``H`` hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ....modules.attention import Positions
from ..architecture.config import MheConfig
from .attention import Attend, Attention, Kept


class Embeddings(torch.nn.Module):
    """Tokens, and where positions are learned, the vectors of those, added."""

    def __init__(self, config: MheConfig) -> None:
        super().__init__()
        self.word = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position == "learned"
        self.position = torch.nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """``input_ids`` [B, S] at ``position_ids`` [B, S], by default from the first on, to [B, S, H]."""
        words: torch.Tensor = self.word(input_ids)
        if self.position is None:
            return words
        if position_ids is None:
            return words + self.position.weight[: input_ids.shape[1]]
        placed: torch.Tensor = words + self.position(position_ids)
        return placed


class Ffn(torch.nn.Module):
    """``down(gelu(up(x)))``."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(hidden, width)
        self.down = torch.nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        updated: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return updated


class Layer(torch.nn.Module):
    """Attention and FFN, each added to its input: normalised after the sum as in BERT, or before, ``norm_first``, as in
    GPT-2."""

    def __init__(self, config: MheConfig, norm_first: bool, epsilon: float) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention: torch.nn.Module = Attention(config)
        self.attention_norm = torch.nn.LayerNorm(config.hidden_size, epsilon)
        self.ffn = Ffn(config.hidden_size, config.intermediate_size)
        self.ffn_norm = torch.nn.LayerNorm(config.hidden_size, epsilon)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        turn: Positions | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H]; the rest is attention's."""
        if self.norm_first:
            hidden = hidden + self.attention(self.attention_norm(hidden), mask, turn, attend)
            updated: torch.Tensor = hidden + self.ffn(self.ffn_norm(hidden))
            return updated
        hidden = self.attention_norm(hidden + self.attention(hidden, mask, turn, attend))
        normed: torch.Tensor = self.ffn_norm(hidden + self.ffn(hidden))
        return normed


class ReadingLayer(torch.nn.Module):
    """A decoder's layer behind an encoder: attention over its own text and over the other, and an FFN, each added to
    its input and normalised after the sum (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: MheConfig, epsilon: float) -> None:
        super().__init__()
        self.attention: Any = Attention(config)
        self.attention_norm = torch.nn.LayerNorm(config.hidden_size, epsilon)
        self.cross_attention: Any = Attention(config)
        self.cross_attention_norm = torch.nn.LayerNorm(config.hidden_size, epsilon)
        self.ffn = Ffn(config.hidden_size, config.intermediate_size)
        self.ffn_norm = torch.nn.LayerNorm(config.hidden_size, epsilon)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        source: Kept,
        source_mask: torch.Tensor | None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """``hidden`` [B, S, H] to [B, S, H]. ``source`` are keys and values of N tokens, made by ``cross_attention``;
        ``source_mask`` [B, 1, 1, N] is added to their scores, ``mask`` and ``attend`` are those of ``attention``."""
        hidden = self.attention_norm(hidden + self.attention(hidden, mask, None, attend))
        hidden = self.cross_attention_norm(hidden + self.cross_attention(hidden, source_mask, kept=source))
        normed: torch.Tensor = self.ffn_norm(hidden + self.ffn(hidden))
        return normed


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Draws weights as BERT and GPT-2 do: normal, 0.02; biases 0, norms 1. Head embeddings start at 0 with as little
    noise, and factors, which have the 1 of mhe_mul in them, at 1."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
        elif not name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, mean=1.0 if "attention.factor." in name else 0.0, std=0.02)
