"""What a decoder behind an encoder begins with, where its class has rules of its own for that, as Whisper has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ...errors import CheckpointError
from ...outside import library_errors
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import offline_transformers
from .transformers_internals import INIT_TOKENS

_DETECTED = -1


def first_tokens(checkpoint: Checkpoint, model: Any, start: int, vocabulary: int) -> tuple[int, ...] | None:
    """The tokens of language, task and timestamps behind ``start``, and that one, by the rules of ``model``'s class
    and the settings of its folder; none where transformers would detect the language in what is heard. None where a
    decoder begins with ``start`` alone. Raises CheckpointError for settings that make no sense."""
    if not hasattr(type(model), INIT_TOKENS):
        return None
    config = offline_transformers().GenerationConfig
    file = checkpoint.folder / "generation_config.json"
    with library_errors(lambda why: CheckpointError(f"{checkpoint.folder}: tokens of language and task: {why}")):
        stated = config.from_pretrained(checkpoint.folder) if file.is_file() else config.from_model_config(model.config)
        stated.decoder_start_token_id, stated.return_timestamps = start, False
        detecting = SimpleNamespace(device="cpu", detect_language=lambda **_: torch.tensor([_DETECTED]))
        found = getattr(type(model), INIT_TOKENS)(detecting, torch.zeros(1), 1, stated, model.config, 1, {})
    ids = tuple(found[0].tolist())
    if max(ids) >= vocabulary:
        raise CheckpointError(
            f"{checkpoint.folder}: its decoder begins with tokens {list(ids)}, beyond its vocabulary of {vocabulary}"
        )
    return () if _DETECTED in ids else ids if len(ids) > 1 else None
