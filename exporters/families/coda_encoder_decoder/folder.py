"""The folder of a conditional encoder with T5's decoder: see ``own_folder`` for what it holds."""

from __future__ import annotations

from pathlib import Path

import torch

from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...checkpoints.own_config import read_config
from ...checkpoints.own_folder import save_model, with_weights
from ..t5.load import look_up_distances
from .config import CodaEncoderDecoderConfig
from .model import CodaEncoderDecoder

__all__ = ["load_model", "model_of", "save_model"]


def load_model(folder: Path) -> CodaEncoderDecoder:
    """The model in ``folder``, in eval mode and float32, without gradients, at its trained reduction.

    Raises CheckpointError for another folder, or one whose weights are missing, misfit or not finite.
    """
    checkpoint = open_checkpoint(folder)
    return model_of(checkpoint, read_config(checkpoint, CodaEncoderDecoderConfig))


def model_of(checkpoint: Checkpoint, config: CodaEncoderDecoderConfig) -> CodaEncoderDecoder:
    """What ``load_model`` returns, of an open checkpoint with its configuration."""
    with torch.device("meta"):
        model = CodaEncoderDecoder(config)
    model = with_weights(model, checkpoint)
    look_up_distances(model.decoder)
    return model
