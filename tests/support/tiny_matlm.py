"""Small MatLM folders with random weights: 3 layers, 4 heads of 8, FFN 64, hidden 32, 64 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.matformer.config import MatformerConfig
from nestforge.exporters.families.matformer.model import MatformerLM

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
