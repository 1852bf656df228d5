"""A causal language model of GPT-2's shape with the configured attention.

Shapes: ``B`` rows, ``S`` tokens, ``H`` hidden, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ....modules.attention import Positions, causal_mask, rotary
from ..architecture.config import MheDecoderConfig
from .blocks import Embeddings, Layer, draw_weights

# Of every LayerNorm, as in GPT-2.
NORM_EPS = 1e-5


class MheDecoder(torch.nn.Module):
    """Token ids to the logits of the next token, at every position."""

    def __init__(self, config: MheDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = torch.nn.ModuleList(
            Layer(config, norm_first=True, epsilon=NORM_EPS) for _ in range(config.num_hidden_layers)
        )
        self.norm = torch.nn.LayerNorm(config.hidden_size, NORM_EPS)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        draw_weights(self)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids`` [B, S] int64 to logits [B, S, V]. Position ``t`` sees positions ``0..t``."""
        hidden = self.embeddings(input_ids)
        mask = causal_mask(input_ids.shape[1], hidden)[None, None]  # [1, 1, S, S]
        turn = self.turn(torch.arange(input_ids.shape[1], device=hidden.device))
        for layer in self.layers:
            hidden = layer(hidden, mask, turn)
        return self.logits(hidden)

    def turn(self, places: torch.Tensor) -> Positions | None:
        """What turns queries and keys [B, n, S, d] at ``places`` [S], or [B, 1, S], where positions are rotary."""
        return rotary(places, self.config.head_size) if self.config.position == "rotary" else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last states [B, S, H] to logits [B, S, V]."""
        weight = self.embeddings.word.weight if self.lm_head is None else self.lm_head.weight
        return functional.linear(self.norm(hidden), weight)
