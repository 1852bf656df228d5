"""Locks between processes; the system drops them with the process that holds them, however it ends."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


def take(descriptor: int) -> None:
    """Locks an open file or folder until it is closed.

    Raises BlockingIOError if another process holds the lock, OSError where the system has none.
    """
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Waits until no other process is in this block with the same file or folder, where the system can lock it."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
