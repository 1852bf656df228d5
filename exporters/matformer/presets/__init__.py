"""The paper's configurations by name: models that can be inspected and planned before anybody has trained them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ....errors import CheckpointError
from ....strict import nearest
from ...checkpoint import Checkpoint
from ..config import NestedConfig
from .language import LANGUAGE
from .vision import VISION

PREFIX = "preset:"
PRESETS: Mapping[str, NestedConfig] = {**LANGUAGE, **VISION}


def preset_checkpoint(name: str) -> Checkpoint:
    """The untrained model that ``preset:name`` stands for. Raises CheckpointError for an unknown name."""
    if name not in PRESETS:
        raise CheckpointError(f"{PREFIX}{name[:80]}: no preset of this name{nearest(name[:80], PRESETS)}")
    where = f"{PREFIX}{name}"
    missing = (
        f"{where}: a preset has no weights; `nestforge inspect` and `nestforge plan` work without, everything else "
        "needs a trained model folder"
    )
    return Checkpoint(Path(where), PRESETS[name].to_json(), {}, missing)
