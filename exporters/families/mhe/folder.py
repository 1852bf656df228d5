"""An MHE model's folder: see ``own_folder`` for what it holds."""

from __future__ import annotations

from pathlib import Path

import torch

from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...checkpoints.own_config import read_config
from ...checkpoints.own_folder import save_model, with_weights
from .architecture.config import MheConfig, MheDecoderConfig, MheEncoderConfig
from .model.decoder import MheDecoder
from .model.encoder import MheEncoder

__all__ = ["load_model", "model_of", "save_model"]


def load_model(folder: Path) -> torch.nn.Module:
    """The MheEncoder or MheDecoder in ``folder``, in eval mode and float32, without gradients.

    Raises CheckpointError for a folder that holds neither, or whose weights are missing, misfit or not finite.
    """
    checkpoint = open_checkpoint(folder)
    is_decoder = checkpoint.config.get("model_type") == "mhe_decoder"
    return model_of(checkpoint, read_config(checkpoint, MheDecoderConfig if is_decoder else MheEncoderConfig))


def model_of(checkpoint: Checkpoint, config: MheConfig) -> torch.nn.Module:
    """What ``load_model`` returns, of an open checkpoint with its configuration."""
    with torch.device("meta"):
        if isinstance(config, MheDecoderConfig):
            return with_weights(MheDecoder(config), checkpoint)
        assert isinstance(config, MheEncoderConfig)
        return with_weights(MheEncoder(config), checkpoint)
