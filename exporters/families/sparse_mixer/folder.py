"""A Sparse Mixer's folder: see ``own_folder`` for what it holds."""

from __future__ import annotations

from pathlib import Path

from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...checkpoints.own_folder import read_config, with_weights
from .architecture.config import SparseMixerConfig
from .model.encoder import SparseMixer


def load_model(folder: Path) -> SparseMixer:
    """The model in ``folder``, in eval mode and float32, without gradients, its mixing matrices held.

    Raises CheckpointError for another folder, or one whose weights are missing, misfit or not finite.
    """
    checkpoint = open_checkpoint(folder)
    return model_of(checkpoint, read_config(checkpoint, SparseMixerConfig))


def model_of(checkpoint: Checkpoint, config: SparseMixerConfig) -> SparseMixer:
    """What ``load_model`` returns, of an open checkpoint with its configuration."""
    model = with_weights(lambda: SparseMixer(config), checkpoint)
    model.hold_matrices()
    return model
