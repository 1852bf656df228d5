"""Whether what a compile writes fits the disk of its output, asked before any work."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from math import inf
from pathlib import Path

from ...elastic import Submodel
from ...errors import BuildError
from ...exporters.source import ModelSource
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import TRACED
from ..work.staging import staging_folder


def written_bytes(source: ModelSource, profile: DeviceProfile, chosen: Sequence[Submodel]) -> int:
    """At least so many bytes are written for engines of the submodels ``chosen``: every weight once in each
    encoding, and once more what other precisions than the traced one are calibrated on."""
    stored: dict[tuple[str, str], int] = {}
    for submodel in chosen:
        for key, size in source.stored_bytes(submodel, profile.backend).items():
            stored[key] = max(stored.get(key, 0), size)
    beside = 4 * source.parameters(source.spec.universal()) if profile.precisions != (TRACED,) else 0
    return sum(stored.values()) + beside


def require_room(written: int, output: Path) -> None:
    """Refuses a compile that writes so many bytes at ``output`` and beside it, where fewer are free; what an
    interrupted one has written counts as free. Raises BuildError."""
    free = _free_bytes(output)
    if written > free:
        raise BuildError(
            f"{output}: the weights alone take {written / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB of its disk are free; "
            "make room, or choose another `output`"
        )


def _free_bytes(output: Path) -> float:
    try:
        place = next(folder for folder in output.absolute().parents if folder.is_dir())
        begun = (staging_folder(output), output) if staging_folder(output).is_dir() else ()  # perhaps published
        made = sum(file.lstat().st_size for folder in begun for file in folder.rglob("*") if file.is_file())
        return shutil.disk_usage(place).free + made
    except (OSError, ValueError):  # nothing can be written there, which is refused with its reason
        return inf
