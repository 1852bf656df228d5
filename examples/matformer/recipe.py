"""Every setting of the training, in one place; training.json repeats them beside what came of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...exporters.families.matformer.config import MatformerConfig, MatformerVitConfig

LEVELS = {"S": 0.125, "M": 0.25, "L": 0.5, "XL": 1.0}


@dataclass(frozen=True)
class Recipe:
    """How every model of one task is trained, nested or not.

    A baseline takes ``steps`` steps of ``batch`` rows, the universal model as many for each of its ``levels`` (name to
    fraction of the FFN), which it draws with ``probabilities``. Rate and weight decay are AdamW's.
    """

    steps: int
    batch: int
    rate: float
    decay: float
    levels: dict[str, float] = field(default_factory=lambda: dict(LEVELS))
    # More than a quarter for XL, whose own neurons no other level trains: the paper's table 6.
    probabilities: tuple[float, ...] = (0.20, 0.22, 0.24, 0.34)

    def widths(self, full: int) -> dict[str, int]:
        """FFN neurons of every level of a layer of ``full``."""
        return {name: round(fraction * full) for name, fraction in self.levels.items()}

    @property
    def universal_steps(self) -> int:
        """The same tokens in all as one baseline for every level."""
        return self.steps * len(self.levels)


LANGUAGE_CONFIG = MatformerConfig(
    vocab_size=256,  # bytes
    hidden_size=64,
    num_hidden_layers=16,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=128,
    activation="gelu",
    tie_word_embeddings=True,
    nested=True,
    granularities={"ffn": tuple(LEVELS.values())},
)
LANGUAGE_RECIPE = Recipe(steps=300, batch=8, rate=4e-3, decay=0.1)

# Nearly all weights of the model that generates are FFN: a step of a small level takes a fraction of the largest's.
WRITER_CONFIG = replace(
    LANGUAGE_CONFIG,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    intermediate_size=4096,
    max_position_embeddings=256,
)
WRITER_RECIPE = Recipe(steps=120, batch=4, rate=1.5e-3, decay=0.1)

DIGITS_CONFIG = MatformerVitConfig(
    image_size=8,
    patch_size=4,
    num_channels=1,
    num_labels=10,
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    intermediate_size=256,
    activation="gelu",
    nested=True,
    granularities={"ffn": tuple(LEVELS.values())},
)
DIGITS_RECIPE = Recipe(steps=800, batch=64, rate=1.5e-3, decay=0.1)
