"""``config.json`` of MatFormer models, read strictly (no torch here). See docs/matformer.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...checkpoints.config import MOST_LAYERS, granularity_problem
from ...checkpoints.own_folder import OwnConfig

Activation = Literal["gelu", "squared_relu"]
Position = Literal["rotary", "relative_bias"]

# Levels that MatFormer trains for FFNs; for heads the paper takes even steps.
_DEFAULT_GRANULARITIES = {"ffn": (0.125, 0.25, 0.5, 1.0), "heads": (0.25, 0.5, 0.75, 1.0)}


@dataclass(frozen=True, kw_only=True)
class NestedConfig(OwnConfig):
    """Configuration that language and vision models share: a stack of layers whose FFN widths may differ.

    ``intermediate_size`` is one width for every layer, or one a layer, in neurons. ``nested`` says that the weights
    were trained so that every prefix is a model; ``granularities`` which levels training sampled, by axis kind as
    fractions rising to 1. ``nested_heads`` makes attention heads an elastic axis too.
    """

    hidden_size: int = field(metadata={"min": 1})
    num_hidden_layers: int = field(metadata={"min": 1})
    num_attention_heads: int = field(metadata={"min": 1})
    intermediate_size: int | tuple[int, ...] = field(metadata={"min": 1})
    activation: Activation
    nested: bool
    granularities: Mapping[str, tuple[float, ...]] | None = field(default=None, hash=False)
    nested_heads: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """FFN neurons of every layer."""
        size = self.intermediate_size
        return (size,) * self.num_hidden_layers if isinstance(size, int) else tuple(size)

    @property
    def head_dim(self) -> int:
        """Size of one head, which no slice changes: attention keeps its scale ``1 / sqrt(head_dim)``."""
        return self.hidden_size // self.num_attention_heads

    @property
    def kinds(self) -> tuple[str, ...]:
        """Axis kinds of the model."""
        return ("ffn", "heads") if self.nested_heads else ("ffn",)

    @property
    def levels(self) -> Mapping[str, tuple[float, ...]] | None:
        """The levels that training sampled: those stated, else the paper's; None where the model is not nested."""
        if self.granularities is not None or not self.nested:
            return self.granularities
        return {kind: _DEFAULT_GRANULARITIES[kind] for kind in self.kinds}

    def problem(self) -> str | None:
        """First problem among the values, as ``key: problem``, or None."""
        if self.num_hidden_layers > MOST_LAYERS:
            return f"num_hidden_layers: expected at most {MOST_LAYERS}, got {self.num_hidden_layers}"
        if self.hidden_size % self.num_attention_heads:
            return f"hidden_size: {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}"
        if len(self.widths) != self.num_hidden_layers:
            return f"intermediate_size: expected {self.num_hidden_layers} widths, one per layer, got {len(self.widths)}"
        return None if self.granularities is None else granularity_problem(self.granularities, self.kinds)


@dataclass(frozen=True, kw_only=True)
class MatformerConfig(NestedConfig):
    """A decoder-only language model. ``max_position_embeddings`` is the longest sequence.

    ``position`` says how attention knows places: ``rotary`` turns queries and keys, ``relative_bias`` adds a learned
    number per head and distance to scores. ``bias`` gives every linear layer one, the matrix back to the vocabulary
    included; ``norm_weights`` gives every LayerNorm its scale and bias.
    """

    vocab_size: int = field(metadata={"min": 1})
    max_position_embeddings: int = field(metadata={"min": 1})
    tie_word_embeddings: bool
    position: Position = "rotary"
    bias: bool = False
    norm_weights: bool = False
    model_type: Literal["matformer_lm"] = "matformer_lm"

    def problem(self) -> str | None:
        found = super().problem()
        if found is None and self.position == "rotary" and self.head_dim % 2:
            return f"num_attention_heads: rotary positions need heads of even size, got {self.head_dim}"
        return found


@dataclass(frozen=True, kw_only=True)
class MatformerVitConfig(NestedConfig):
    """A vision transformer on square images of ``image_size`` pixels, cut into patches of ``patch_size``."""

    image_size: int = field(metadata={"min": 1})
    patch_size: int = field(metadata={"min": 1})
    num_channels: int = field(metadata={"min": 1})
    num_labels: int = field(metadata={"min": 1})
    model_type: Literal["matformer_vit"] = "matformer_vit"

    @property
    def patches(self) -> int:
        """Patches of one image; the sequence has the class token in front of them."""
        return (self.image_size // self.patch_size) ** 2

    def problem(self) -> str | None:
        found = super().problem()
        if found is None and self.image_size % self.patch_size:
            return f"image_size: {self.image_size} is no multiple of patch_size {self.patch_size}"
        return found


# MatLM at the paper's five sizes, named by parameters with the 256 000-token embedding, to d_model.
_HIDDEN_SIZES = {"matlm-78m": 256, "matlm-180m": 512, "matlm-310m": 768, "matlm-463m": 1024, "matlm-850m": 1536}


def _matlm(width: int) -> MatformerConfig:
    return MatformerConfig(
        vocab_size=256_000,
        hidden_size=width,
        num_hidden_layers=16,
        num_attention_heads=16,
        intermediate_size=4 * width,
        max_position_embeddings=1024,
        activation="gelu",  # the paper names GELU and squared ReLU, and not which of them it used
        tie_word_embeddings=True,
        # Positions, biases and norm weights follow from the paper's parameter counts (docs/decisions/0018).
        position="relative_bias",
        bias=True,
        norm_weights=True,
        nested=True,
        granularities={"ffn": (0.125, 0.25, 0.5, 1.0)},
    )


LANGUAGE: Mapping[str, MatformerConfig] = {name: _matlm(width) for name, width in _HIDDEN_SIZES.items()}


def _matvit(width: int, layers: int, heads: int) -> MatformerVitConfig:
    return MatformerVitConfig(
        image_size=224,
        patch_size=16,
        num_channels=3,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        activation="gelu",
        num_labels=1000,
        nested=True,
        granularities={"ffn": (0.125, 0.25, 0.5, 1.0)},
    )


# The standard vision transformers with a nested FFN, and a head of ImageNet's 1000 classes.
VISION: Mapping[str, MatformerVitConfig] = {"matvit-b16": _matvit(768, 12, 12), "matvit-l16": _matvit(1024, 24, 16)}
