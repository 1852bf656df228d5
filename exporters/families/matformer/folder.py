"""A MatFormer model's folder: see ``own_folder`` for what it holds."""

from __future__ import annotations

from pathlib import Path

import torch

from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...checkpoints.own_folder import read_config, with_weights
from .architecture.config import MatformerConfig, MatformerVitConfig
from .model.language_model import MatformerLM
from .model.vision_model import MatformerViT


def load_model(folder: Path) -> torch.nn.Module:
    """The MatformerLM or MatformerViT in ``folder``, in eval mode and float32, without gradients.

    Raises CheckpointError for a folder that holds neither, or whose weights are missing, misfit or not finite.
    """
    checkpoint = open_checkpoint(folder)
    if checkpoint.config.get("model_type") == "matformer_vit":
        return model_of(checkpoint, read_config(checkpoint, MatformerVitConfig))
    return model_of(checkpoint, read_config(checkpoint, MatformerConfig))


def model_of(checkpoint: Checkpoint, config: MatformerConfig | MatformerVitConfig) -> torch.nn.Module:
    """What ``load_model`` returns, of an open checkpoint with its configuration."""
    return with_weights(lambda: made(config), checkpoint)


def made(config: MatformerConfig | MatformerVitConfig) -> torch.nn.Module:
    """The model that ``config`` describes, with weights drawn at random."""
    return MatformerLM(config) if isinstance(config, MatformerConfig) else MatformerViT(config)
