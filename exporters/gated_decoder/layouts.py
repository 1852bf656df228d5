"""What the classes of each model type have that ``config.json`` does not say, and their defaults where it is silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layout:
    """One model type. ``defaults`` are those of the transformers class for keys that files leave out.

    ``qkv_bias``: queries, keys and values always have a bias. ``reads_attention_bias``, ``reads_mlp_bias`` and
    ``caps``: whether the class heeds ``attention_bias``, ``mlp_bias`` and the soft caps of its config.
    """

    class_name: str
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    head_norms: bool = False
    norms_around: bool = False
    caps: bool = False
    gemma3n: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


_GEMMA: dict[str, object] = {"head_dim": 256, "tie_word_embeddings": True, "pad_token_id": 0}
_GEMMA2: dict[str, object] = {
    **_GEMMA,
    "num_key_value_heads": 4,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

LAYOUTS: dict[str, Layout] = {
    "llama": Layout("LlamaForCausalLM", reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": Layout("MistralForCausalLM", defaults={"num_key_value_heads": 8}),
    "qwen2": Layout("Qwen2ForCausalLM", qkv_bias=True, defaults={"num_key_value_heads": 32}),
    "qwen3": Layout(
        "Qwen3ForCausalLM",
        reads_attention_bias=True,
        head_norms=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
    "gemma": Layout("GemmaForCausalLM", reads_attention_bias=True, defaults={**_GEMMA, "num_key_value_heads": 16}),
    "gemma2": Layout("Gemma2ForCausalLM", reads_attention_bias=True, norms_around=True, caps=True, defaults=_GEMMA2),
    "gemma3_text": Layout(
        "Gemma3ForCausalLM",
        reads_attention_bias=True,
        head_norms=True,
        norms_around=True,
        caps=True,
        defaults={**_GEMMA, "num_key_value_heads": 4},
    ),
    "gemma3n_text": Layout(
        "Gemma3nForCausalLM",
        reads_attention_bias=True,
        head_norms=True,
        norms_around=True,
        caps=True,
        gemma3n=True,
        defaults={**_GEMMA, "num_key_value_heads": 2, "final_logit_softcapping": 30.0},
    ),
}
