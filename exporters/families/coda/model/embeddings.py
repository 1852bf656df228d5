"""The states that the first layer reads: of a text's tokens, or of an image's patches.

Shapes: ``B`` rows of ``n`` tokens, ``d`` hidden.
"""

from __future__ import annotations

import torch

from .....errors import InputError
from ..architecture.config import CodaConfig
from ..architecture.inputs import ImageInput
from .norms import make_norm


class Embeddings(torch.nn.Module):
    """What texts and images share: vectors of places where positions are learned, and a norm where norms come last."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__()
        learned = config.position == "learned"
        self.position = torch.nn.Embedding(config.most_tokens, config.hidden_size) if learned else None
        self.norm = make_norm(config) if config.norm_place == "after" else None

    def placed(self, states: torch.Tensor) -> torch.Tensor:
        """``states`` [B, n, d] with their places, normed."""
        if self.position is not None:
            states = states + self.position.weight[: states.shape[1]]
        return states if self.norm is None else self.norm(states)


class TextEmbeddings(Embeddings):
    """Tokens, and what kind each is of, where kinds have vectors; one kind alone is every token's."""

    def __init__(self, config: CodaConfig) -> None:
        super().__init__(config)
        assert config.vocab_size is not None
        kinds = config.type_vocab_size
        self.most_tokens = config.most_tokens
        self.word = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type = torch.nn.Embedding(kinds, config.hidden_size) if kinds else None

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Both [B, n] int64 to [B, n, d]. Raises InputError for more tokens than the model takes."""
        if input_ids.shape[1] > self.most_tokens:
            raise InputError(f"{input_ids.shape[1]} tokens: the model takes at most {self.most_tokens}")
        states: torch.Tensor = self.word(input_ids)
        if self.token_type is not None:
            states = states + (self.token_type.weight if token_type_ids is None else self.token_type(token_type_ids))
        return self.placed(states)


class ImageEmbeddings(Embeddings):
    """Patches row by row, each a product with ``patch`` [d, C, height, width], behind the learned tokens ``front``."""

    def __init__(self, config: CodaConfig, image: ImageInput) -> None:
        super().__init__(config)
        size = (image.patch_height, image.patch_width)
        self.patch = torch.nn.Conv2d(image.channels, config.hidden_size, size, stride=size)
        front = torch.nn.Parameter(torch.empty(image.front_tokens, config.hidden_size))
        self.front = front if image.front_tokens else None

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """``pixel_values`` [B, C, height, width] to [B, n, d]."""
        states = self.patch(pixel_values).flatten(2).transpose(1, 2)
        if self.front is not None:
            states = torch.cat((self.front.expand(states.shape[0], -1, -1), states), 1)
        return self.placed(states)


def make_embeddings(config: CodaConfig) -> TextEmbeddings | ImageEmbeddings:
    """Those of what the model reads."""
    return TextEmbeddings(config) if config.image is None else ImageEmbeddings(config, config.image)
