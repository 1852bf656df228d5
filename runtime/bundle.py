"""Opening a bundle: schema, names, sizes and, on request, every byte; docs/bundle-format.md holds the rules.

A bundle may come from anywhere, so nothing outside its folder is touched and nothing is read before its size is known.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import BundleCorruptError, BundleFormatError
from .manifest import BUILD_NAME, MANIFEST_NAME, BuildRecord, FileEntry, Manifest
from .read_manifest import MAX_JSON_BYTES, read_build_record, read_manifest

Check = Literal["fast", "full"]

_MEND = "fetch the bundle again, or compile it again"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle; ``path`` is absolute, so that engines resolve their weights beside themselves."""

    path: Path
    manifest: Manifest
    build: BuildRecord

    def file(self, name: str) -> Path:
        """Path of a file that the manifest lists."""
        return self.path / name

    def __repr__(self) -> str:
        counts = f"{len(self.manifest.submodels)} submodels, {len(self.manifest.engines)} engines"
        return f"Bundle({str(self.path)!r}: {self.manifest.name}, {counts})"


def open_bundle(path: str | os.PathLike[str], check: Check = "fast") -> Bundle:
    """Reads the manifest and the build record, and checks the files.

    ``fast``: the manifest by the hash in the build record, every listed file by kind and size. ``full``: the SHA-256 of
    all bytes as well. Raises BundleFormatError or BundleCorruptError.
    """
    if check not in ("fast", "full"):
        raise ValueError(f"check: expected 'fast' or 'full', got {check!r}")
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise BundleFormatError(f"bundle {path}: not a folder; expected one that `nestforge compile` wrote")
    raw = read_json(folder, MANIFEST_NAME)
    manifest = read_manifest(raw, str(folder / MANIFEST_NAME))
    build = read_build_record(read_json(folder, BUILD_NAME), str(folder / BUILD_NAME))
    digest = hashlib.sha256(raw).hexdigest()
    if digest != build.manifest_sha256:
        raise BundleCorruptError(
            f"{folder / MANIFEST_NAME}: sha256 {digest}, {BUILD_NAME} expects {build.manifest_sha256}; {_MEND}"
        )
    for entry in manifest.files:
        _check_file(folder, entry, check)
    return Bundle(folder, manifest, build)


def _check_file(folder: Path, entry: FileEntry, check: Check) -> None:
    with _regular_file(folder / entry.path) as (file, size):
        if size != entry.bytes:
            raise BundleCorruptError(f"{folder / entry.path}: {size} bytes, expected {entry.bytes}; {_MEND}")
        if check == "full":
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != entry.sha256:
                raise BundleCorruptError(f"{folder / entry.path}: sha256 {digest}, expected {entry.sha256}; {_MEND}")


def read_json(folder: Path, name: str) -> bytes:
    with _regular_file(folder / name) as (file, size):
        if size > MAX_JSON_BYTES:
            raise BundleFormatError(f"{folder / name}: {size} bytes, more than the {MAX_JSON_BYTES} allowed")
        return file.read(MAX_JSON_BYTES + 1)


@contextmanager
def _regular_file(path: Path) -> Iterator[tuple[io.BufferedReader, int]]:
    """The open file and its size. A link, a folder, a pipe or a device is refused, and none is waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise BundleFormatError(f"{path}: expected a regular file, not a link or a folder; {_MEND}")
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise BundleCorruptError(f"{path}: missing; {_MEND}") from None
    except OSError as failure:
        raise BundleCorruptError(f"{path}: cannot be read ({failure.strerror}); {_MEND}") from failure
    with os.fdopen(descriptor, "rb") as file:
        yield file, os.fstat(descriptor).st_size
