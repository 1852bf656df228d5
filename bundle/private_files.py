"""Folders and files of this user alone, for what the runtime trusts without checking its meaning."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ..errors import OutputError
from ..outside_file import read_file
from ..profiles.probe_host import cache_folder
from ..whole_file import remove_unfinished, write_whole

_KEY_BYTES, _MAX_KEY_BYTES = 32, 4096
# Names a key file in place of this host's own, so that the machines of one fleet accept each other's plans.
KEY_VARIABLE = "NESTFORGE_PLAN_KEY"


def private_folder(name: str) -> Path:
    """``name`` in nestforge's cache folder, made if missing. Raises OutputError if others may change it."""
    try:
        folder = cache_folder() / name
        folder.mkdir(mode=0o700, exist_ok=True)
        _require_private(folder)
    except OSError as failure:
        where = failure.filename or name
        raise OutputError(f"{where}: cannot be used as a cache ({failure.strerror})") from failure
    remove_unfinished(folder)
    return folder


def plan_key() -> bytes:
    """The secret by which this host recognises plans that it built: 32 random bytes, made at first use.

    Raises OutputError for a key that others may read or change, or that is too short to keep anything.
    """
    named = os.environ.get(KEY_VARIABLE, "")
    path = Path(named) if named else private_folder("tensorrt") / "plan-key"
    try:
        if not named and not path.exists():
            _make_key(path)
        _require_private(path)
        key = read_file(path, _MAX_KEY_BYTES, OutputError)
    except OSError as failure:
        raise OutputError(f"plan key {path}: cannot be read or made ({failure.strerror})") from failure
    if len(key) < _KEY_BYTES:
        raise OutputError(
            f"plan key {path}: {len(key)} bytes, expected at least {_KEY_BYTES}; remove it and build again"
        )
    return key


def _make_key(path: Path) -> None:
    key = secrets.token_bytes(_KEY_BYTES)
    try:
        write_whole(path, lambda stream: stream.write(key), "the plan key", new=True, mode=0o600)
    except OutputError:
        if not path.exists():  # else another process was first
            raise


def _require_private(path: Path) -> None:
    if hasattr(os, "getuid"):
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077 or path.is_symlink():
            allowed = "700" if path.is_dir() else "600"
            raise OutputError(f"{path}: others may read or change it; make it yours alone (chmod {allowed})")
