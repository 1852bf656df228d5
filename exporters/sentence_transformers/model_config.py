"""Reads ``config_sentence_transformers.json`` strictly: prompts, and what becomes of the embedding (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...strict import nearest, structure
from ..checkpoints.checkpoint import MODULES_FILE, read_json

_CONFIG_FILE = "config_sentence_transformers.json"
_MODEL_TYPE = "SentenceTransformer"
# The other kinds of sentence-transformers 6.2.
_OTHER_KINDS = {
    "CrossEncoder": "scores pairs of texts",
    "SparseEncoder": "gives sparse vectors over a vocabulary",
    "MultiVectorEncoder": "gives a vector for every token",
}


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
    data = read_json(path) if path.is_file() else {}
    _refuse_other_kinds(path, data.get("model_type", _MODEL_TYPE))
    config = structure(ModelConfig, data, str(path), CheckpointError)
    name = config.default_prompt_name
    if name is not None and name not in config.prompts:
        raise CheckpointError(f"{path}: default_prompt_name {name[:80]!r}{nearest(name[:80], config.prompts)}")
    return config


def _refuse_other_kinds(path: Path, kind: object) -> None:
    """Before the keys of the file, which are each kind's own."""
    if kind == _MODEL_TYPE:
        return
    what = f", which {_OTHER_KINDS[str(kind)]}," if str(kind) in _OTHER_KINDS else ""
    raise CheckpointError(
        f"{path}: model_type {kind!r:.80}{what} is not supported; expected {_MODEL_TYPE!r} (without {MODULES_FILE} the "
        "folder is compiled as the transformers model that it holds)"
    )
