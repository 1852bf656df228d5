"""A translation model: an encoder, and a decoder that reads it, with the configured attention in all three places.

The Transformer of Vaswani et al. (2017), figure 1, with learned positions and GELU. Shapes: ``B`` rows, ``N`` tokens of
the text that is read, ``S`` tokens of the one that is written, ``H`` hidden, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ....modules.attention import causal_mask
from ..architecture.config import MheEncoderDecoderConfig
from .blocks import Embeddings, Layer, ReadingLayer, draw_weights
from .encoder import padding_mask

# Of every LayerNorm, as in PyTorch's own Transformer.
NORM_EPS = 1e-5


class MheEncoderDecoder(torch.nn.Module):
    """Two texts to the logits of the token behind each one of the second."""

    def __init__(self, config: MheEncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Stack(lambda: Layer(config, norm_first=False, epsilon=NORM_EPS), config.num_hidden_layers)
        self.decoder = Stack(lambda: ReadingLayer(config, NORM_EPS), config.decoder_layers)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        draw_weights(self)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """``input_ids`` and ``attention_mask`` [B, N] int64, 1 where a token counts, and ``decoder_input_ids`` [B, S]
        to logits [B, S, V]. Position ``t`` of the second text sees its positions ``0..t``."""
        hidden = self.embeddings(decoder_input_ids)
        source_mask = padding_mask(attention_mask, hidden)
        source = self.encode(input_ids, source_mask)
        mask = causal_mask(hidden.shape[1], hidden)[None, None]  # [1, 1, S, S]
        layer: Any
        for layer in self.decoder.layers:
            hidden = layer(hidden, mask, layer.cross_attention.kept(source), source_mask)
        return self.logits(hidden)

    def encode(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """What the encoder makes of ``input_ids`` [B, N], whose ``mask`` [B, 1, 1, N] is added to scores: [B, N, H]."""
        hidden: torch.Tensor = self.embeddings(input_ids)
        for layer in self.encoder.layers:
            hidden = layer(hidden, mask)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last states [B, S, H] to logits [B, S, V]."""
        return functional.linear(hidden, (self.lm_head or self.embeddings.word).weight)


class Stack(torch.nn.Module):
    """The layers of one side."""

    def __init__(self, layer: Callable[[], torch.nn.Module], count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layer() for _ in range(count))
