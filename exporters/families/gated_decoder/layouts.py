"""What the classes of each model type have that ``config.json`` does not say, and their defaults where it is silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...hugging_face.interface import NEXT_TOKEN, QUESTION, SEQUENCE, TOKEN, DecoderHead
from .windows import (
    Window,
    of_a_pattern,
    of_every_layer,
    of_every_second_layer,
    of_four_in_five,
    of_later_layers,
)


@dataclass(frozen=True)
class Layout:
    """One model type. ``classes`` are those read, with their heads; the first is the base model. ``defaults``
    are those of the transformers class for keys that files leave out.

    ``qkv_bias``: queries, keys and values always have a bias. ``reads_attention_bias``, ``reads_mlp_bias`` and
    ``caps``: whether the class heeds ``attention_bias``, ``mlp_bias`` and the soft caps of its config. ``packed``: one
    layer makes queries, keys and values, and one gate and up. ``pad`` is its padding token. ``original_positions`` are
    the ones that its model type has where ``config.json`` is silent, before rotary positions turn to other frequencies.
    ``window``: how its class reads sliding windows, None where it has none.
    """

    classes: Mapping[str, DecoderHead | None]
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    head_norms: bool = False
    norms_around: bool = False
    caps: bool = False
    gemma3n: bool = False
    packed: bool = False
    pad: int | None = None
    original_positions: int | None = None
    window: Window | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)


def _classes(stem: str, question: str | None = None) -> dict[str, DecoderHead | None]:
    """``question`` is the attribute that holds the decoder in the class that answers questions, if there is one."""
    classes: dict[str, DecoderHead | None] = {
        f"{stem}Model": None,
        f"{stem}ForCausalLM": NEXT_TOKEN,
        f"{stem}ForSequenceClassification": SEQUENCE,
        f"{stem}ForTokenClassification": TOKEN,
    }
    return classes | ({f"{stem}ForQuestionAnswering": replace(QUESTION, prefix=question)} if question else {})


_GEMMA_DEFAULTS: dict[str, object] = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA2: dict[str, object] = {
    **_GEMMA_DEFAULTS,
    "sliding_window": 4096,
    "num_key_value_heads": 4,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

LAYOUTS: dict[str, Layout] = {
    "llama": Layout(_classes("Llama", "transformer"), reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": Layout(
        _classes("Mistral", "model"),
        window=of_every_layer,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Layout(
        _classes("Qwen2", "transformer"),
        qkv_bias=True,
        window=of_later_layers,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "qwen3": Layout(
        _classes("Qwen3", "transformer"),
        reads_attention_bias=True,
        head_norms=True,
        window=of_later_layers,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    ),
    "phi3": Layout(_classes("Phi3"), packed=True, pad=32_000, original_positions=4096, window=of_every_layer),
    "gemma": Layout(
        _classes("Gemma"), reads_attention_bias=True, pad=0, defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 16}
    ),
    "gemma2": Layout(
        _classes("Gemma2"),
        reads_attention_bias=True,
        norms_around=True,
        caps=True,
        pad=0,
        window=of_every_second_layer,
        defaults=_GEMMA2,
    ),
    "gemma3_text": Layout(
        {
            "Gemma3TextModel": None,
            "Gemma3ForCausalLM": NEXT_TOKEN,
            "Gemma3TextForSequenceClassification": SEQUENCE,
        },
        reads_attention_bias=True,
        head_norms=True,
        norms_around=True,
        caps=True,
        pad=0,
        window=of_a_pattern,
        defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 4, "sliding_window": 4096},
    ),
    "gemma3n_text": Layout(
        {"Gemma3nTextModel": None, "Gemma3nForCausalLM": NEXT_TOKEN},
        reads_attention_bias=True,
        head_norms=True,
        norms_around=True,
        caps=True,
        gemma3n=True,
        pad=0,
        window=of_four_in_five,
        defaults={
            **_GEMMA_DEFAULTS,
            "num_key_value_heads": 2,
            "final_logit_softcapping": 30.0,
            "sliding_window": 512,
        },
    ),
}
