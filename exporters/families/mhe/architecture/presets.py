"""The paper's models by name (section 5.2), and the shapes of which it states parameters (4.4), for every attention.

Encoders have BERT-base's shape, decoders GPT-2-base's; ``large`` and ``medium`` are those of its appendix. Translation
models have 6 and 6 layers, and texts of up to 100 tokens. Sublayers of attention have no biases: the paper's counts
omit them and its text does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from .config import AttentionKind, MheConfig, MheDecoderConfig, MheEncoderConfig, MheEncoderDecoderConfig

# Layers, width, heads.
_BASE, _LARGE, _GPT3 = (12, 768, 12), (24, 1024, 16), (96, 12288, 96)
_TRANSLATION = (6, 512, 8)


def _shape(kind: AttentionKind, layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "attention": kind,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "softmax_scale": (width // heads) ** -0.5,
        "factors": "e" if kind == "mhe_mul" else None,
    }


def _encoder(kind: AttentionKind, shape: tuple[int, int, int]) -> MheEncoderConfig:
    return MheEncoderConfig(**_shape(kind, *shape), vocab_size=30_000, max_position_embeddings=512, head="masked_lm")


def _decoder(kind: AttentionKind, shape: tuple[int, int, int], tokens: int) -> MheDecoderConfig:
    return MheDecoderConfig(**_shape(kind, *shape), vocab_size=50_257, max_position_embeddings=tokens)


def _encoder_decoder(kind: AttentionKind) -> MheEncoderDecoderConfig:
    """37K tokens that both languages share."""
    shape = _shape(kind, *_TRANSLATION)
    return MheEncoderDecoderConfig(**shape, vocab_size=37_000, max_position_embeddings=100, decoder_start_token_id=0)


def _of(kind: AttentionKind) -> dict[str, MheConfig]:
    name = kind.replace("_", "-")
    return {
        f"{name}-encoder-base": _encoder(kind, _BASE),
        f"{name}-encoder-large": _encoder(kind, _LARGE),
        f"{name}-decoder-base": _decoder(kind, _BASE, 512),
        f"{name}-decoder-medium": _decoder(kind, _LARGE, 512),
        f"{name}-decoder-gpt3": _decoder(kind, _GPT3, 2048),
        f"{name}-encoder-decoder-base": _encoder_decoder(kind),
    }


PRESETS: Mapping[str, MheConfig] = {
    name: config for kind in get_args(AttentionKind) for name, config in _of(kind).items()
}
