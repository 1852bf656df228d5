"""Published configurations by name: models that can be inspected and planned before anybody has trained them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..strict import nearest
from .checkpoints.checkpoint import Checkpoint
from .family import families

PREFIX = "preset:"


def presets() -> dict[str, Mapping[str, Any]]:
    """Name to what ``config.json`` would hold, of every family."""
    return {name: config for family in families() for name, config in family.presets.items()}


def preset_checkpoint(name: str) -> Checkpoint:
    """The untrained model that ``preset:name`` stands for. Raises CheckpointError for an unknown name."""
    known = presets()
    if name not in known:
        raise CheckpointError(f"{PREFIX}{name[:80]}: no preset of this name{nearest(name[:80], known)}")
    where = f"{PREFIX}{name}"
    missing = (
        f"{where}: a preset has no weights; `nestforge inspect` and `nestforge plan` work without, everything else "
        "needs a trained model folder"
    )
    return Checkpoint(Path(where), known[name], {}, missing)
