"""MatViT-B/16 and L/16: the standard vision transformers with a nested FFN, and a head of ImageNet's 1000 classes."""

from __future__ import annotations

from collections.abc import Mapping

from .config import MatformerVitConfig


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


VISION: Mapping[str, MatformerVitConfig] = {"matvit-b16": _matvit(768, 12, 12), "matvit-l16": _matvit(1024, 24, 16)}
