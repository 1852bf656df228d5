"""Small Sparse Mixer folders with random weights: 4 layers that mix or attend, densely or by 4 experts; hidden 16,
sequence 16.

Layer 0 mixes, 1 mixes and routes, 2 attends and routes, 3 attends.
"""

from pathlib import Path
from typing import Any

import torch
from nestforge.exporters.checkpoints.own_folder import save_model
from nestforge.exporters.families.sparse_mixer.config import SparseMixerConfig
from nestforge.exporters.families.sparse_mixer.model import SparseMixer
from support.tokenizer_files import word_tokenizer

torch.set_num_threads(1)  # several threads on products this small only wait for each other

TINY_MIXER: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "attention_layers": (2, 3),
    "moe_layers": (1, 2),
    "num_experts": 4,
    "expert_intermediate_size": 24,
    "min_capacity": 1,
}


def mixer_config(**overrides: Any) -> SparseMixerConfig:
    return SparseMixerConfig(**{**TINY_MIXER, **overrides})


def tiny_mixer(config: SparseMixerConfig) -> SparseMixer:
    """The model, with weights so large that every part of it shows in the outputs."""
    torch.manual_seed(0)
    model = SparseMixer(config)
    for name, parameter in model.named_parameters():
        scale = 1.0 if name == "embeddings.word.weight" else 0.3
        parameter.data = torch.randn_like(parameter) * scale + name.endswith("norm.weight")
    model.eval().requires_grad_(False).hold_matrices()
    return model


def save_tiny_mixer(folder: Path, **overrides: Any) -> Path:
    """``tiny_mixer`` as a user's folder would hold it, with the tokenizer of ``tiny_models``."""
    config = mixer_config(**overrides)
    return save_model(
        tiny_mixer(config), config, folder, {"tokenizer.json": word_tokenizer(config.vocab_size).to_str()}
    )
