"""MatViT: a vision transformer of nested layers. Pre-norm, [CLS] token, learned positions, biases everywhere.

Shapes: ``B`` images of ``C`` channels and ``P`` patches, ``S = P + 1`` tokens, ``H`` hidden, ``K`` classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....modules.attention import NestedAttention
from ..architecture.config import MatformerVitConfig
from .nested_ffn import NestedFFN
from .per_layer import one_per_layer

# Of every LayerNorm, as in the vision transformers that MatViT follows.
NORM_EPS = 1e-6


class MatformerViT(torch.nn.Module):
    """Pixels to the logits of the classes and the embedding of the image.

    Linear weights are drawn as MatLM's are (normal, 0.02; what closes a residual branch divided by ``sqrt(2 L)``), the
    patch projection by its fan-in, biases are 0.
    """

    def __init__(self, config: MatformerVitConfig) -> None:
        super().__init__()
        self.config = config
        hidden, patch = config.hidden_size, config.patch_size
        self.patch = torch.nn.Conv2d(config.num_channels, hidden, patch, stride=patch)
        self.cls_token = torch.nn.Parameter(torch.zeros(1, 1, hidden))
        self.position_embedding = torch.nn.Parameter(torch.zeros(1, config.patches + 1, hidden))
        self.layers = torch.nn.ModuleList(Layer(config, width) for width in config.widths)
        self.norm = torch.nn.LayerNorm(hidden, NORM_EPS)
        self.head = torch.nn.Linear(hidden, config.num_labels)
        self._draw_weights()

    def forward(
        self, pixel_values: torch.Tensor, widths: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``pixel_values`` [B, C, height, width] float32 to logits [B, K] and the [CLS] state after the final norm
        [B, H].

        ``widths`` and ``heads`` run the first so many neurons and heads of each layer, by default all it holds.
        """
        patches = self.patch(pixel_values).flatten(2).transpose(1, 2)  # [B, P, H]
        tokens = torch.cat((self.cls_token.expand(patches.shape[0], -1, -1), patches), dim=1)  # [B, S, H]
        hidden = tokens + self.position_embedding
        per_layer = (one_per_layer(values, len(self.layers)) for values in (widths, heads))
        for layer, width, kept in zip(self.layers, *per_layer, strict=True):
            hidden = layer(hidden, width, kept)
        embedding = self.norm(hidden[:, 0])
        return self.head(embedding), embedding

    @torch.no_grad()
    def _draw_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.zeros_(parameter)
            elif not name.endswith(("norm.weight", "patch.weight")):
                closes_branch = name.endswith(("attention.output.weight", "ffn.down.weight"))
                scale = (2 * len(self.layers)) ** -0.5 if closes_branch else 1.0
                torch.nn.init.normal_(parameter, std=0.02 * scale)


class Layer(torch.nn.Module):
    """Attention and FFN, each on the normalised state and added to it."""

    def __init__(self, config: MatformerVitConfig, width: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.attention_norm = torch.nn.LayerNorm(hidden, NORM_EPS)
        self.attention = NestedAttention(hidden, config.num_attention_heads, config.head_dim, bias=True)
        self.ffn_norm = torch.nn.LayerNorm(hidden, NORM_EPS)
        self.ffn = NestedFFN(hidden, width, config.activation, bias=True)

    def forward(self, hidden: torch.Tensor, width: int | None, heads: int | None) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), heads=heads)
        updated: torch.Tensor = hidden + self.ffn(self.ffn_norm(hidden), width)
        return updated
