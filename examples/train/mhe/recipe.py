"""Every setting of the training, in one place, alike for every attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ....exporters.families.mhe.architecture.config import (
    AttentionKind,
    MheConfig,
    MheDecoderConfig,
    MheEncoderConfig,
)

KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)


@dataclass(frozen=True)
class Recipe:
    """``steps`` steps of AdamW over ``batch`` rows of ``window`` bytes, with ``decoder_rate`` or ``encoder_rate``;
    of encoders ``share`` of a row's bytes is hidden. ``held_out`` rows judge."""

    steps: int
    batch: int
    window: int
    decoder_rate: float
    encoder_rate: float
    decay: float
    share: float
    held_out: int


# Encoders, whose norms come last, learn nothing beyond the commonest byte in these steps at 2e-3 (11.6 % right), and do
# at 5e-4 (17.2 %, 17.4 %: mhe_mul, mha).
RECIPE = Recipe(
    steps=300, batch=8, window=128, decoder_rate=2e-3, encoder_rate=5e-4, decay=0.05, share=0.15, held_out=256
)


def models(window: int, **shape: Any) -> Mapping[str, MheConfig]:
    """``encoder-KIND`` and ``decoder-KIND`` of every kind of attention, of bytes, for rows of ``window``. ``shape``
    replaces fields of their configuration."""
    common = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 512,
        "max_position_embeddings": 2 * window,
        "elastic_heads": False,  # nothing here is cut
        **shape,
    }
    found: dict[str, MheConfig] = {}
    for kind in KINDS:
        own = {**common, "attention": kind, "factors": "e" if kind == "mhe_mul" else None}
        found[f"encoder-{kind}"] = MheEncoderConfig(**own, vocab_size=257, head="masked_lm")  # bytes and the mask
        found[f"decoder-{kind}"] = MheDecoderConfig(**own, vocab_size=256)
    return found


MODELS = models(RECIPE.window)
