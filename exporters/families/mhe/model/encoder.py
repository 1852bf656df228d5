"""An encoder of BERT's shape with the configured attention.

Shapes: ``B`` rows, ``S`` tokens, ``H`` hidden, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ....modules.attention import additive_mask, rotary
from ..architecture.config import MheEncoderConfig
from .blocks import Embeddings, Layer, draw_weights

# Of every LayerNorm, as in BERT.
NORM_EPS = 1e-12


class MheEncoder(torch.nn.Module):
    """Token ids to the outputs of the configured head.

    none: last hidden state [B, S, H]. masked_lm: logits [B, S, V]. classifier: logits [B, labels].
    """

    def __init__(self, config: MheEncoderConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embeddings = NormedEmbeddings(config)
        self.layers = torch.nn.ModuleList(
            Layer(config, norm_first=False, epsilon=NORM_EPS) for _ in range(config.num_hidden_layers)
        )
        self.head = MaskedLmHead(config) if config.head == "masked_lm" else None
        self.pooler = torch.nn.Linear(hidden, hidden) if config.num_labels else None
        self.classifier = torch.nn.Linear(hidden, config.num_labels) if config.num_labels else None
        draw_weights(self)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``input_ids`` and ``attention_mask`` [B, S] int64, 1 where a token counts, to the head's output."""
        hidden: torch.Tensor = self.embeddings(input_ids)
        mask = padding_mask(attention_mask, hidden)
        turn = None
        if self.config.position == "rotary":
            turn = rotary(torch.arange(input_ids.shape[1], device=hidden.device), self.config.head_size)
        for layer in self.layers:
            hidden = layer(hidden, mask, turn)
        if self.head is not None:
            logits: torch.Tensor = self.head(hidden, self.embeddings.word.weight)
            return logits
        if self.pooler is None or self.classifier is None:
            return hidden
        labels: torch.Tensor = self.classifier(torch.tanh(self.pooler(hidden[:, 0])))
        return labels


class NormedEmbeddings(Embeddings):
    """Embeddings, normalised."""

    def __init__(self, config: MheEncoderConfig) -> None:
        super().__init__(config)
        self.norm = torch.nn.LayerNorm(config.hidden_size, NORM_EPS)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        normed: torch.Tensor = self.norm(super().forward(input_ids, position_ids))
        return normed


class MaskedLmHead(torch.nn.Module):
    """Logits of the token at every position, through the table of tokens and a bias of its own."""

    def __init__(self, config: MheEncoderConfig) -> None:
        super().__init__()
        self.transform = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = torch.nn.LayerNorm(config.hidden_size, NORM_EPS)
        self.bias = torch.nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """``hidden`` [B, S, H] and ``words`` [V, H] to logits [B, S, V]."""
        return functional.linear(self.norm(functional.gelu(self.transform(hidden))), words, self.bias)


def padding_mask(attention_mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``attention_mask`` [B, S] to [B, 1, 1, S] in the dtype of ``like``, added to scores: 0 where a key counts.

    Every row of probabilities sums to 1, that of a row without a token too, which the fold of mhe_add's values needs.
    """
    return additive_mask(attention_mask > 0, like)[:, None, None]
