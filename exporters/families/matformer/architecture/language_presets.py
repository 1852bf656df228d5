"""MatLM at the paper's five sizes, named by parameters with the 256 000-token embedding."""

from __future__ import annotations

from collections.abc import Mapping

from .config import MatformerConfig

# Name to d_model; all else is common to them.
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
