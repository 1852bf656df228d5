"""Small language models with random weights, as a user's folder would hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.matformer.config import MatformerConfig
from nestforge.exporters.families.matformer.model import MatformerLM
from support.tiny_models import word_tokenizer

_SETTINGS: dict[str, Any] = {
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


def save_tiny_matlm(folder: Path, **overrides: Any) -> Path:
    """A MatLM of 2 layers, 2 heads of 8, FFN 32, hidden 16 and 24 tokens, with the tokenizer of ``tiny_models``."""
    config = MatformerConfig(**{**_SETTINGS, **overrides})
    torch.manual_seed(0)
    model = MatformerLM(config)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return save_model(model, config, folder, {"tokenizer.json": word_tokenizer(config.vocab_size).to_str()})


def save_sure_matlm(folder: Path, factor: float) -> Path:
    """As ``save_tiny_matlm`` with 32 tokens and 16 positions, its first weights times ``factor``.

    Such a model is sure of something, so every layer matters.
    """
    config = MatformerConfig(**{**_SETTINGS, "vocab_size": 32, "max_position_embeddings": 16})
    torch.manual_seed(0)
    model = MatformerLM(config)
    for parameter in model.parameters():
        parameter.data *= factor
    return save_model(model, config, folder, {"tokenizer.json": word_tokenizer(config.vocab_size).to_str()})
