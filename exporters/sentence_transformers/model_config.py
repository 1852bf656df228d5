"""Reads ``config_sentence_transformers.json`` strictly: prompts, and what becomes of the embedding (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...strict import nearest, structure
from ..checkpoints.checkpoint import read_json

_CONFIG_FILE = "config_sentence_transformers.json"
_MODEL_TYPE = "SentenceTransformer"


@dataclass(frozen=True)
class ModelConfig:
    """``prompts`` by name; the one called ``default_prompt_name`` stands before a text that asks for none; of an
    embedding the first ``truncate_dim`` numbers are kept. The other keys change no vector: the similarity is that of
    ``similarity()``, and versions and requirements are about packages."""

    prompts: Mapping[str, str | None] = field(default_factory=dict)
    default_prompt_name: str | None = None
    truncate_dim: int | None = field(default=None, metadata={"min": 1})
    model_type: str = _MODEL_TYPE
    similarity_fn_name: str | None = None
    requirements: Any = None
    __version__: Any = None

    @property
    def texts(self) -> dict[str, str]:
        """The prompts; one that is null is empty."""
        return {name: prompt or "" for name, prompt in self.prompts.items()}


def read_model_config(folder: Path) -> ModelConfig:
    """What the file says; the defaults where there is none. Raises CheckpointError for what is not understood."""
    path = folder / _CONFIG_FILE
    config = structure(ModelConfig, read_json(path) if path.is_file() else {}, str(path), CheckpointError)
    if config.model_type != _MODEL_TYPE:
        raise CheckpointError(
            f"{path}: model_type {config.model_type[:80]!r} is not supported; expected {_MODEL_TYPE!r} (without "
            "modules.json the folder is compiled as the transformers model that it holds)"
        )
    name = config.default_prompt_name
    if name is not None and name not in config.prompts:
        raise CheckpointError(f"{path}: default_prompt_name {name[:80]!r}{nearest(name[:80], config.prompts)}")
    return config
