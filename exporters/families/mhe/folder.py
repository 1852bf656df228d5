"""An MHE model's folder: see ``own_folder`` for what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...checkpoints.own_folder import read_config, with_weights
from .architecture.config import MheConfig, MheDecoderConfig, MheEncoderConfig, MheEncoderDecoderConfig
from .model.decoder import MheDecoder
from .model.encoder import MheEncoder
from .model.encoder_decoder import MheEncoderDecoder


def load_model(folder: Path) -> torch.nn.Module:
    """The MheEncoder, MheDecoder or MheEncoderDecoder in ``folder``, in eval mode and float32, without gradients.

    Raises CheckpointError for a folder that holds none, or whose weights are missing, misfit or not finite.
    """
    checkpoint = open_checkpoint(folder)
    kinds: Mapping[object, type[MheConfig]] = {
        "mhe_decoder": MheDecoderConfig,
        "mhe_encoder_decoder": MheEncoderDecoderConfig,
    }
    return model_of(
        checkpoint, read_config(checkpoint, kinds.get(checkpoint.config.get("model_type"), MheEncoderConfig))
    )


def model_of(checkpoint: Checkpoint, config: MheConfig) -> torch.nn.Module:
    """What ``load_model`` returns, of an open checkpoint with its configuration."""
    return with_weights(lambda: made(config), checkpoint)


def made(config: MheConfig) -> torch.nn.Module:
    """The model that ``config`` describes, with weights drawn at random."""
    if isinstance(config, MheEncoderDecoderConfig):
        return MheEncoderDecoder(config)
    if isinstance(config, MheDecoderConfig):
        return MheDecoder(config)
    assert isinstance(config, MheEncoderConfig)
    return MheEncoder(config)
