"""The shape of a multi-exit model: widths, exits, and from them every tensor's name and extents (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...hugging_face.tensors import Shape, linear_shapes
from .sidecar import ExitSpec


@dataclass(frozen=True)
class Widths:
    """Attention heads and FFN channels of one layer; either may be 0."""

    heads: int
    ffn: int


@dataclass(frozen=True)
class CostEffArchitecture:
    """Everything that determines the graph, and how the stored tensors become its parameters.

    ``rank`` is None for a dense word embedding. ``layers`` are the model's widths, ``stored`` those of the tensors in
    the file; ``kept`` maps an axis, such as ``layers.3.heads``, to the stored ids that the model uses, all of them
    where it has no entry. ``has_entropy`` is false where the softmax of an exit means nothing: regression, or labels
    that do not exclude each other.
    """

    hidden: int
    head_size: int
    vocabulary: int
    positions: int
    types: int
    pad: int
    rank: int | None
    activation: str
    norm_eps: float
    layers: tuple[Widths, ...]
    exits: ExitSpec
    has_entropy: bool
    stored: tuple[Widths, ...]
    kept: Mapping[str, tuple[int, ...]]

    @property
    def parameter_shapes(self) -> dict[str, Shape]:
        """Every parameter of the model. A sub-layer of width 0 keeps its output bias and its LayerNorm only."""
        return {name: shape for name, shape in self._shapes(self.layers).items() if 0 not in shape}

    @property
    def stored_shapes(self) -> dict[str, Shape]:
        """Every tensor that the weights may hold; those without elements may be left out."""
        return self._shapes(self.stored)

    def _shapes(self, layers: Sequence[Widths]) -> dict[str, Shape]:
        h = self.hidden
        shapes: dict[str, Shape] = {"embeddings.word_embeddings.weight": (self.vocabulary, self.rank or h)}
        if self.rank:
            shapes["embeddings.word_projection.weight"] = (h, self.rank)
        shapes["embeddings.position_embeddings.weight"] = (self.positions, h)
        shapes["embeddings.token_type_embeddings.weight"] = (self.types, h)
        shapes |= _norm("embeddings", h)
        for index, widths in enumerate(layers):
            at, inner = f"encoder.layer.{index}", widths.heads * self.head_size
            for part in ("query", "key", "value"):
                shapes |= linear_shapes(f"{at}.attention.self.{part}", h, inner)
            shapes |= linear_shapes(f"{at}.attention.output.dense", inner, h)
            shapes |= _norm(f"{at}.attention.output", h)
            shapes |= linear_shapes(f"{at}.intermediate.dense", h, widths.ffn)
            shapes |= linear_shapes(f"{at}.output.dense", widths.ffn, h)
            shapes |= _norm(f"{at}.output", h)
        for layer in self.exits.layers:
            shapes |= linear_shapes(f"exits.{layer}", h, self.exits.classes)
        return shapes


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.LayerNorm.weight": (width,), f"{name}.LayerNorm.bias": (width,)}
