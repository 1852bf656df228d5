"""A task of a conditional encoder with T5's decoder as a folder: that of its encoder, by the whole model's names.

A task is the encoder's adapters, routers, norms, schedule and reductions; the decoder is frozen with the rest.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ..coda.task_folder import another_graph, require_structure, save_difference
from .config import ENCODER, CodaEncoderDecoderConfig
from .folder import load_model


def save_task(trained: Path, base: Path, folder: Path) -> Path:
    """Writes what the checkpoint ``trained`` has beyond ``base`` into ``folder``, which must not exist; returns it.

    Raises CheckpointError unless both have the same structure, and bit for bit the same frozen tensors, the decoder's
    too.
    """
    model, frozen = load_model(trained), load_model(base)
    for field in fields(CodaEncoderDecoderConfig):
        ours, theirs = getattr(model.config, field.name), getattr(frozen.config, field.name)
        if field.name != "encoder" and ours != theirs:
            raise another_graph(trained, field.name, ours, theirs)
    require_structure(trained, model.config.encoder, frozen.config.encoder)
    return save_difference((trained, model), (base, frozen), model.config.encoder, folder, ENCODER)
