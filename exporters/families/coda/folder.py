"""The folder of an encoder with conditional adapters: see ``own_folder`` for what it holds."""

from __future__ import annotations

from pathlib import Path

import torch

from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...checkpoints.own_config import read_config
from ...checkpoints.own_folder import save_model, with_weights
from .architecture.config import CodaConfig
from .model.encoder import CodaEncoder

__all__ = ["load_model", "model_of", "save_model"]


def load_model(folder: Path) -> CodaEncoder:
    """The model in ``folder``, in eval mode and float32, without gradients, at its trained reduction.

    Raises CheckpointError for another folder, or one whose weights are missing, misfit or not finite.
    """
    checkpoint = open_checkpoint(folder)
    return model_of(checkpoint, read_config(checkpoint, CodaConfig))


def model_of(checkpoint: Checkpoint, config: CodaConfig) -> CodaEncoder:
    """What ``load_model`` returns, of an open checkpoint with its configuration."""
    with torch.device("meta"):
        model = CodaEncoder(config)
    return with_weights(model, checkpoint)
