"""Small MatLM folders with random weights: 3 layers, 4 heads of 8, FFN 64, hidden 32, 64 tokens; and half as large,
with a tokenizer."""

from pathlib import Path
from typing import Any

import torch
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.matformer.config import MatformerConfig
from nestforge.exporters.families.matformer.model import MatformerLM
from support.tokenizer_files import word_tokenizer

TINY_MATLM: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 48,
    "activation": "gelu",
    "tie_word_embeddings": True,
    "nested": True,
}


def matlm_config(**overrides: Any) -> MatformerConfig:
    return MatformerConfig(**{**TINY_MATLM, **overrides})


def tiny_matlm(config: MatformerConfig) -> MatformerLM:
    """The model, with weights so large that every part of it shows in the logits."""
    torch.manual_seed(0)
    model = MatformerLM(config)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * (1.0 if name == "embed_tokens.weight" else 0.2)
    return model.eval().requires_grad_(False)


def save_tiny_matlm(folder: Path, **overrides: Any) -> Path:
    """``config.json`` and ``model.safetensors`` of ``tiny_matlm``."""
    config = matlm_config(**overrides)
    return save_model(tiny_matlm(config), config, folder)


_TEXT_SETTINGS: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "activation": "gelu",
    "tie_word_embeddings": True,
    "nested": True,
}


def save_text_matlm(folder: Path, **overrides: Any) -> Path:
    """A MatLM of 2 layers, 2 heads of 8, FFN 32, hidden 16 and 24 tokens, with the tokenizer of ``tiny_models``."""
    config = MatformerConfig(**{**_TEXT_SETTINGS, **overrides})
    torch.manual_seed(0)
    model = MatformerLM(config)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return save_model(model, config, folder, {"tokenizer.json": word_tokenizer(config.vocab_size).to_str()})


def save_sure_matlm(folder: Path, factor: float) -> Path:
    """As ``save_text_matlm`` with 32 tokens and 16 positions, its first weights times ``factor``.

    Such a model is sure of something, so every layer matters.
    """
    config = MatformerConfig(**{**_TEXT_SETTINGS, "vocab_size": 32, "max_position_embeddings": 16})
    torch.manual_seed(0)
    model = MatformerLM(config)
    for parameter in model.parameters():
        parameter.data *= factor
    return save_model(model, config, folder, {"tokenizer.json": word_tokenizer(config.vocab_size).to_str()})
