"""Small folders of encoders with conditional adapters and random weights: 2 layers, 4 heads of 8, FFN 48, hidden 32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.coda.config import CodaConfig, ImageInput, SoftTopK
from nestforge.exporters.families.coda.model import CodaEncoder
from support.tiny_models import word_tokenizer

torch.set_num_threads(1)  # several threads on products this small only wait for each other

SCHEDULE = SoftTopK(rounds=3, epsilon=0.5, epsilon_start=4.0, epsilon_decay=0.7, initial="zero")
TINY_CODA: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "activation": "relu",
    "gated_ffn": False,
    "norm": "rms",
    "position": "relative",
    "adapter_size": 8,
    "adapter_activation": "relu",
    "router": "soft_top_k",
    "soft_top_k": SCHEDULE,
    "keys_of": "all",
    "ffn_residual": "raw",
    "reduction": 1,
    "reductions": (4, 1),
}
# In the place of texts: images of 2 x 8 x 12, whose six patches stand behind one token.
OF_IMAGES: dict[str, Any] = {
    "vocab_size": None,
    "max_position_embeddings": None,
    "image": ImageInput(channels=2, height=8, width=12, patch_height=4, patch_width=4),
}


def coda_config(**overrides: Any) -> CodaConfig:
    settings = {**TINY_CODA, **overrides}
    if settings["router"] != "soft_top_k":
        settings["soft_top_k"] = None
    if settings.get("adapter") == "lora":
        settings["adapter_activation"] = None
    return CodaConfig(**settings)


def tiny_coda(config: CodaConfig, seed: int = 0) -> CodaEncoder:
    """The model, with weights so large that every part of it shows in the outputs."""
    torch.manual_seed(seed)
    model = CodaEncoder(config)
    for name, parameter in model.named_parameters():
        scale = 1.0 if name == "embeddings.word.weight" else 0.3
        parameter.data = torch.randn_like(parameter) * scale + name.endswith("norm.weight")
    return model.eval().requires_grad_(False)


def save_tiny_coda(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """``tiny_coda`` as a user's folder would hold it, with the tokenizer of ``tiny_models``."""
    config = coda_config(**overrides)
    tokenizer = word_tokenizer(config.vocab_size).to_str()
    return save_model(tiny_coda(config, seed), config, folder, {"tokenizer.json": tokenizer})
