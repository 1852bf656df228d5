"""Where a compile works until it may publish: ``OUTPUT.partial``, renamed to ``OUTPUT`` when every gate has passed.

An interrupted compile leaves its staging folder; the same command finds it by its key and goes on. A failed one leaves
nothing. Each result in it is written beside and renamed, so what exists is whole.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import NestforgeError, OutputError
from ..runtime.seal import to_json

_KEY = "key.json"
_LOCK = ".lock"
# safetensors writes into a file of the second form, which a killed process leaves.
_UNFINISHED = ("*.writing", ".tmp*")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG),
    *(errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP),
)


@dataclass(frozen=True)
class Stage:
    """The staging folder of one compile: ``folder`` becomes the bundle, ``work`` is thrown away."""

    folder: Path

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def once(self, path: Path, produce: Callable[[Path], None]) -> Path:
        """``path``, produced now unless an earlier run finished it."""
        if not path.exists():
            beside = path.with_name(path.name + ".writing")
            produce(beside)
            beside.rename(path)
        return path

    def once_json(self, name: str, produce: Callable[[], Any]) -> Any:
        """A JSON result kept in ``work``, computed now unless an earlier run finished it."""
        return json.loads(self.once(self.work / name, lambda p: write_synced(p, to_json(produce()))).read_bytes())


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file and waits until it has reached the disk."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def staged(output: Path, key: Mapping[str, Any]) -> Iterator[Stage]:
    """A staging folder beside ``output``, published by rename when the block ends without an error.

    Raises OutputError if ``output`` exists, cannot be written, or another compile works on it.
    """
    if not output.name:
        raise OutputError(f"output {str(output)!r}: expected the name of a folder to make")
    folder = output.with_name(output.name + ".partial")
    with _disk_errors(output):
        if output.exists() or output.is_symlink():
            raise OutputError(f"{output}: exists already; choose another --output or remove it")
        if folder.is_symlink() or (folder.exists() and not _is_staging(folder)):
            raise OutputError(f"{folder}: not a folder that a compile left; remove it or choose another --output")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutputError(f"{folder}: another compile is working on this output") from None
            stage = Stage(folder)
            try:
                _resume_or_clear(stage, to_json(key))
                yield stage
                _publish(stage, output)
            except (NestforgeError, OSError):
                shutil.rmtree(folder, ignore_errors=True)
                raise


def _is_staging(folder: Path) -> bool:
    """Whether clearing ``folder`` cannot take a user's own files."""
    return folder.is_dir() and ((folder / _LOCK).is_file() or not any(folder.iterdir()))


def _resume_or_clear(stage: Stage, key: bytes) -> None:
    known = stage.work / _KEY
    if not known.is_file() or known.read_bytes() != key:
        for entry in stage.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != _LOCK:
                entry.unlink()
        stage.work.mkdir()
        write_synced(known, key)
    for place in (stage.folder, stage.work):
        for pattern in _UNFINISHED:
            for unfinished in place.glob(pattern):
                unfinished.unlink()


def _publish(stage: Stage, output: Path) -> None:
    shutil.rmtree(stage.work)
    (stage.folder / _LOCK).unlink()
    for folder in (stage.folder, output.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if folder is stage.folder:
            stage.folder.rename(output)


@contextmanager
def _disk_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        if failure.errno in _FULL:
            raise OutputError(f"{output}: the disk is full; nothing was published") from failure
        ours = failure.filename is None or str(failure.filename).startswith(str(output.parent))
        if failure.errno in _UNWRITABLE and ours:
            raise OutputError(f"{output}: cannot be written ({failure.strerror})") from failure
        raise
