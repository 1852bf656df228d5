"""Encoders of the published T5 v1.1 shapes, made conditional as the paper analyses them: adapters of 64, all layers
conditional, soft top-k of 20 rounds.

The sizes of the paper's own final models are not known, nor is the target epsilon of a task: 0.1 lies between the
published 0.02 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config import CodaConfig, KeysOf, SoftTopK

# Layers, width, FFN, heads.
_SHAPES = {"base": (12, 768, 2048, 12), "large": (24, 1024, 2816, 16), "xl": (24, 2048, 5120, 32)}
_SCHEDULE = SoftTopK(rounds=20, epsilon=0.1, epsilon_start=4.0, epsilon_decay=0.7, initial="zero")


def _encoder(shape: tuple[int, int, int, int], keys_of: KeysOf, key_value_heads: int | None) -> CodaConfig:
    layers, width, ffn, heads = shape
    return CodaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=64,
        softmax_scale=1.0,
        vocab_size=32_128,
        max_position_embeddings=512,
        activation="gelu_tanh",
        gated_ffn=True,
        norm="rms",
        position="relative",
        adapter_size=64,
        adapter_activation="relu",
        router="soft_top_k",
        soft_top_k=_SCHEDULE,
        keys_of=keys_of,
        ffn_residual="raw",
        reduction=3,
        reductions=(8, 5, 4, 3, 2, 1),
    )


PRESETS: Mapping[str, CodaConfig] = {
    name: config
    for size, shape in _SHAPES.items()
    for name, config in {
        f"coda-t5-{size}-k-to-k": _encoder(shape, "selected", None),
        f"coda-t5-{size}-k-to-all": _encoder(shape, "all", None),
        f"coda-t5-{size}-k-to-all-mq": _encoder(shape, "all", 1),
    }.items()
}
