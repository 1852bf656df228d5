"""Small MHE folders with random weights: 2 layers, 4 heads of 8, FFN 48, hidden 32, 24 tokens of vocabulary 40."""

from pathlib import Path
from typing import Any

import torch
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.mhe.config import (
    MheConfig,
    MheDecoderConfig,
    MheEncoderConfig,
    MheEncoderDecoderConfig,
)
from nestforge.exporters.families.mhe.model import made

torch.set_num_threads(1)  # several threads on products this small only wait for each other

# Makes heads of mhe_add weigh keys so nearly alike that all their forms hold: exp(7) apart at most.
FAR = 0.4

TINY_MHE: dict[str, Any] = {
    "attention": "mhe_mul",
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}


def encoder_config(**overrides: Any) -> MheEncoderConfig:
    return MheEncoderConfig(**_settings(overrides))


def decoder_config(**overrides: Any) -> MheDecoderConfig:
    return MheDecoderConfig(**_settings(overrides))


def pair_config(**overrides: Any) -> MheEncoderDecoderConfig:
    """One layer on each side, unless stated."""
    sizes = {"num_hidden_layers": 1, "decoder_start_token_id": 1}
    return MheEncoderDecoderConfig(**_settings({**sizes, **overrides}))


def tiny_mhe(config: MheConfig, far: float = 1.0) -> Any:  # MheEncoder, MheDecoder or MheEncoderDecoder
    """The model, with weights so large that every part of it shows in the outputs; a factor of each head is 0, one is
    below 0. Head embeddings of queries are ``far`` times as large."""
    torch.manual_seed(0)
    model = made(config)
    for name, parameter in model.named_parameters():
        scale = 1.0 if name == "embeddings.word.weight" else 0.3
        ones = name.endswith("norm.weight") or "attention.factor." in name
        parameter.data = torch.randn_like(parameter) * scale + ones
        if "attention.factor." in name or "attention.embedding." in name:
            shift = 0.0 if "attention.factor." in name else 1.0
            by_head = parameter.data.T if config.width_first else parameter.data
            by_head[:, 0], by_head[:, 1] = 0 - shift, -0.5 - shift
        if name.endswith("attention.embedding.query"):
            parameter.data *= far
    return model.eval().requires_grad_(False)


def save_tiny_mhe(folder: Path, decoder: bool = False, far: float = 1.0, **overrides: Any) -> Path:
    """``tiny_mhe`` as a user's folder would hold it."""
    config = decoder_config(**overrides) if decoder else encoder_config(**overrides)
    return save_model(tiny_mhe(config, far), config, folder)


def save_tiny_pair(folder: Path, far: float = 1.0, **overrides: Any) -> Path:
    """The folder of a translation model, whose places differ so much that its texts do not repeat one token."""
    config = pair_config(**overrides)
    model = tiny_mhe(config, far)
    model.embeddings.position.weight *= 5
    return save_model(model, config, folder)


def _settings(overrides: dict[str, Any]) -> dict[str, Any]:
    settings = {**TINY_MHE, **overrides}
    if settings["attention"] == "mhe_mul":
        settings.setdefault("factors", "e")
    return settings
