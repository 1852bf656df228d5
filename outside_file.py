"""Files of users and of other programs, read: each has an end and a bounded size, and none is waited for.

A link is followed; what a bundle holds is read by ``bundle/files.py``, which follows none.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path


def open_file(path: Path, error: Callable[[str], Exception]) -> BufferedReader:
    """Opens a file whose end is known. Raises ``error(message)`` for what cannot be read, and for folders, pipes and
    devices."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe is not waited for
    except (OSError, ValueError) as failure:  # a name with a null character is a ValueError
        raise error(f"{path}: cannot be read ({getattr(failure, 'strerror', None) or failure})") from failure
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{path}: expected a file, not a folder, a pipe or a device")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, max_bytes: int, error: Callable[[str], Exception]) -> bytes:
    """The content of a file of at most ``max_bytes``. Raises ``error(message)`` as ``open_file``, and for more."""
    with open_file(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise error(f"{path}: {size} bytes, more than the {max_bytes} allowed")
        try:
            return file.read(size)
        except OSError as failure:
            raise error(f"{path}: cannot be read ({failure.strerror or failure})") from failure
