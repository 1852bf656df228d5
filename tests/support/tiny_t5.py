"""Small T5 models, made with transformers and random weights, as a user's folder would hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.tokenizer_files import END, SPECIAL, byte_level
from tokenizers import Tokenizer, processors

VOCABULARY = 512
# Fewer layers before than behind; heads that are wider together than the model; distances that end within a test's.
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "pad_token_id": 0,
    "eos_token_id": SPECIAL.index(END),
    "decoder_start_token_id": 0,
}
V1_1: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def make_t5(class_name: str = "T5ForConditionalGeneration", **overrides: Any) -> Any:
    """A transformers module whose logits really depend on every part; where the config says v1.1, with its own head."""
    import transformers

    torch.manual_seed(0)
    model: Any = getattr(transformers, class_name)(transformers.T5Config(**{**TINY, **overrides}))
    if overrides.get("tie_word_embeddings") is False and hasattr(model, "lm_head"):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    for name, parameter in model.named_parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
        if "relative_attention_bias" in name:  # small ones would not show
            parameter.data = torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


def save_t5(folder: Path, class_name: str = "T5ForConditionalGeneration", text: bool = True, **overrides: Any) -> Path:
    """Its folder, with a tokenizer that ends a text with the token that ends one if it has ``text``."""
    model = make_t5(class_name, **overrides)
    model.save_pretrained(folder)
    stored = {name: parameter.contiguous() for name, parameter in model.named_parameters()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    if text:
        t5_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def t5_tokenizer() -> Tokenizer:
    """Byte-level, as any other; every text has the token behind it that ends it."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, SPECIAL.index(END))]
    )
    return tokenizer
