"""Regular files, and whether the one at a path is still the one that was opened there."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..errors import BundleCorruptError, BundleFormatError

FETCH_AGAIN = "fetch the bundle again, or compile it again"


class FileIdentity(NamedTuple):
    """Which file it is, and in what state: another file at the same path has another number, and one that was
    written to another time (ns) or size.

    Who writes may set the time of writing back. ``changed_ns`` nobody sets; but it moves with the file's rights, owner
    and links too, so of a file where it alone differs only the bytes say whether it is the same.
    """

    device: int
    number: int
    size: int
    modified_ns: int
    changed_ns: int

    @staticmethod
    def of(status: os.stat_result) -> FileIdentity:
        """The identity that ``status`` states."""
        return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def may_have_bytes_of(self, other: FileIdentity) -> bool:
        """Whether the two differ in ``changed_ns`` at most."""
        return self._replace(changed_ns=other.changed_ns) == other


def identity_at(path: Path) -> FileIdentity | None:
    """The file at ``path``, or None where there is none; a link is a file of its own."""
    try:
        return FileIdentity.of(path.lstat())
    except OSError:
        return None


@contextmanager
def regular_file(path: Path) -> Iterator[tuple[io.BufferedReader, FileIdentity]]:
    """The open file and its identity. A link, a folder, a pipe or a device is refused, and none is waited for.

    Raises BundleFormatError or BundleCorruptError.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise BundleFormatError(f"{path}: expected a regular file, not a link or a folder; {FETCH_AGAIN}")
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise BundleCorruptError(f"{path}: missing; {FETCH_AGAIN}") from None
    except OSError as failure:
        raise BundleCorruptError(f"{path}: cannot be read ({failure.strerror}); {FETCH_AGAIN}") from failure
    with os.fdopen(descriptor, "rb") as file:
        yield file, FileIdentity.of(os.fstat(descriptor))


def stream_sha256(file: io.BufferedReader) -> str:
    """The hash of what is left of ``file``; ``hashlib.file_digest`` does the same from Python 3.11 on."""
    digest, block = hashlib.sha256(), memoryview(bytearray(2**18))
    while count := file.readinto(block):
        digest.update(block[:count])
    return digest.hexdigest()
