"""``config.json`` of a model of ours, read strictly into a frozen dataclass and written back (no torch here)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from ...errors import CheckpointError
from ...strict import structure, unstructure
from .checkpoint import Checkpoint

# Said by many tools in a config.json, and nothing about the graph.
_IGNORED_KEYS = ("architectures", "_name_or_path")


class OwnConfig(ABC):
    """The base of such a dataclass, whose fields are the keys of ``config.json``."""

    @abstractmethod
    def problem(self) -> str | None:
        """What makes no sense among the values, as ``key: problem``, or None."""

    def to_json(self) -> dict[str, Any]:
        """The object that ``config.json`` holds, which reads back as this configuration."""
        data: dict[str, Any] = unstructure(self)
        return data


C = TypeVar("C", bound=OwnConfig)


def config_from_json(cls: type[C], data: Mapping[str, Any], where: str) -> C:
    """Reads ``data`` as ``cls``; ``where`` names the document.

    Raises CheckpointError for an unknown or missing key, and for values that make no model.
    """
    stated = {key: value for key, value in data.items() if key not in _IGNORED_KEYS}
    config = structure(cls, stated, where, CheckpointError)
    if problem := config.problem():
        raise CheckpointError(f"{where}: {problem}")
    return config


def read_config(checkpoint: Checkpoint, cls: type[C]) -> C:
    """The configuration of the model in ``checkpoint``. Raises CheckpointError as ``config_from_json`` does."""
    return config_from_json(cls, checkpoint.config, str(checkpoint.folder / "config.json"))
