"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ..errors import OutputError


def write_whole(path: Path, write: Callable[[IO[bytes]], object], lost: str) -> None:
    """Lets ``write`` fill a file beside ``path``, waits until it has reached the disk, and renames it to ``path``.

    Raises OutputError, which says that ``lost`` was not kept, where the system refuses; nothing is left then.
    """
    beside = None
    try:
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False) as stream:
            beside = Path(stream.name)
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        beside.chmod(0o644)
        beside.replace(path)
    except OSError as failure:
        if beside is not None:
            with contextlib.suppress(OSError):
                beside.unlink()
        raise OutputError(f"{path}: cannot be written ({failure.strerror}); {lost} was not kept") from failure
