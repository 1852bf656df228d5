"""Locks between processes; the system drops them with the process that holds them, however it ends."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import OutputError
from .outside import printable

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

# How long a writer waits before it says so, and before it gives up: whoever may read a file may lock it for ever.
_SILENT_SECONDS = 1.0
_MOST_SECONDS = 60.0
_BETWEEN_SECONDS = 0.05

_logger = logging.getLogger("nestforge")


def take(descriptor: int) -> None:
    """Locks an open file or folder until it is closed.

    Raises BlockingIOError if another process holds the lock, OSError where the system has none.
    """
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Waits until no other process is in this block with the same file or folder, where the system can lock it.

    Says so after a second, to the logger ``nestforge``. Raises OutputError after a minute.
    """
    descriptor = None
    try:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            _wait(path, descriptor)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def holders(descriptor: int) -> str:
    """Who has the open file locked, as far as the system tells: ``process 12 (python)``."""
    status = os.fstat(descriptor)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = []
    with contextlib.suppress(OSError), open("/proc/locks") as locks:
        for line in locks:  # "1: FLOCK  ADVISORY  READ 12 fe:00:345 0 EOF"; one that waits has "->" in the second place
            words = line.split()
            if words[1:2] == ["FLOCK"] and words[5:6] == [file]:
                found.append(_named(words[4]))
    return ", ".join(found) or "another process"


def _wait(path: Path, descriptor: int) -> None:
    started, is_said = time.monotonic(), False
    while True:
        try:
            return take(descriptor)
        except BlockingIOError:
            waited = time.monotonic() - started
        if waited > _MOST_SECONDS:
            raise OutputError(
                f"{path}: locked by {holders(descriptor)} for {waited:.0f} s; nothing was written; wait until that is "
                "done, or end it, and try again"
            )
        if waited > _SILENT_SECONDS and not is_said:
            is_said = True
            who = holders(descriptor)
            _logger.warning("%s", printable(f"{path}: locked by {who}; waiting for at most {_MOST_SECONDS:g} s"))
        time.sleep(_BETWEEN_SECONDS)


def _named(process: str) -> str:
    with contextlib.suppress(OSError):
        return f"process {process} ({Path('/proc', process, 'comm').read_text().strip()})"
    return f"process {process}"
