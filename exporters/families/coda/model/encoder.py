"""An encoder with conditional adapters: a text or an image to last states, or to the logits of classes.

Shapes: ``B`` rows of ``n`` tokens, ``d`` hidden, ``k`` selected tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..architecture.config import CodaConfig
from ..architecture.inputs import MASK
from ..architecture.selection import layer_tokens
from .embeddings import make_embeddings
from .layer import Layer
from .norms import make_norm
from .places import Places, RelativeBias
from .router import Selection


class CodaEncoder(torch.nn.Module):
    """Without labels: last states [B, n, d]; else logits [B, labels] of the mean of a row's tokens.

    ``reduction`` is the r at which conditional layers compute, the trained one until something else is set. With
    ``any_length`` a row may have fewer tokens than that, of which a layer computes one. Weights are drawn from a normal
    distribution of 0.02 (norms 1, biases 0).
    """

    def __init__(self, config: CodaConfig, any_length: bool = False) -> None:
        super().__init__()
        self.config, self.reduction, self.any_length = config, config.reduction, any_length
        self.embeddings = make_embeddings(config)
        self.relative_bias = RelativeBias(config.num_attention_heads) if config.position == "relative" else None
        self.layers = torch.nn.ModuleList(
            Layer(config, layer in config.conditional) for layer in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config) if config.norm_place == "before" else None
        labels = config.num_labels
        self.classifier = None if labels is None else torch.nn.Linear(config.hidden_size, labels)
        self._draw_weights()

    def forward(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        """``inputs`` in the order of ``config.inputs``: ids, a mask that is 1 where a token counts (None: all do) and
        perhaps kinds of token, each [B, n] int64; or pixels [B, C, height, width]. Raises as ``routed``."""
        return self.routed(*inputs)[0]

    def routed(
        self, *inputs: torch.Tensor | None, given: Mapping[int, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, dict[int, Selection]]:
        """What ``forward`` returns, and the selected tokens of every conditional layer; ``given`` [B, k] by layer
        replaces the routers' own.

        Raises InputError for more tokens than the model takes, PlanError for fewer in a row than the reduction, unless
        rows may have ``any_length``.
        """
        read = dict(zip(self.config.inputs, inputs, strict=True))
        mask = read.pop(MASK, None)
        hidden = self.embeddings(*read.values())
        length = hidden.shape[1]
        turned = self.config.head_size if self.config.position == "rotary" else None
        places = Places.of(mask, hidden, self.relative_bias, turned)
        counts = self.counts(length)
        found: dict[int, Selection] = {}
        for number, layer in enumerate(self.layers):
            hidden, selection = layer(hidden, places, counts.get(number), (given or {}).get(number))
            if selection is not None:
                found[number] = selection
        return self._answer(hidden if self.norm is None else self.norm(hidden), places.is_token), found

    def counts(self, tokens: int) -> dict[int, int]:
        """By conditional layer how many of ``tokens`` it computes; empty where all pass without a gate."""
        return layer_tokens(self.config, tokens, self.reduction, self.any_length)

    def _answer(self, hidden: torch.Tensor, is_token: torch.Tensor | None) -> torch.Tensor:
        if self.classifier is None:
            return hidden
        if is_token is None:
            mean = hidden.mean(1)
        else:
            counted = is_token[..., None].to(hidden.dtype)
            mean = (hidden * counted).sum(1) / counted.sum(1).clamp(min=1)
        logits: torch.Tensor = self.classifier(mean)
        return logits

    @torch.no_grad()
    def _draw_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.zeros_(parameter)
            elif not name.endswith("norm.weight"):
                torch.nn.init.normal_(parameter, std=0.02)
