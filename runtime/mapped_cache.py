"""A private, hashed cache on this host of engines in ONNX Runtime's packed layout.

The packed layout is tied to this processor and this ONNX Runtime, which maps it without checking one byte: a changed
byte would change answers silently. So the folder is its owner's alone, and every file is hashed before each use.
The folder may be deleted at any time; an engine takes about twice the bytes of its weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import OutputError
from ..profiles.probe_host import probe_host

_ENGINE = "engine.onnx"
_WEIGHTS = "engine.bin"
_RECEIPT = "receipt.json"


def mapped_engine(key: Mapping[str, str], build: Callable[[Path, str], None]) -> Path:
    """The packed engine for ``key`` on this processor, built by ``build(engine_path, weights_name)`` where missing.

    An entry whose bytes are not those of its receipt is built again. Raises OutputError if the cache cannot be written
    or is not private.
    """
    whole = {**key, "processor": _processor()}
    name = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    try:
        root = _private_folder()
        folder = root / name
        if not _intact(folder):
            _build(folder, build)
    except OSError as failure:
        raise OutputError(
            f"cache of mapped engines: {failure.strerror} ({failure.filename or cache_folder()}); free some space, set "
            "XDG_CACHE_HOME to another folder, or use residency 'packed' or 'shared'"
        ) from failure
    return folder / _ENGINE


def cache_folder() -> Path:
    """``nestforge/mapped`` in ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "nestforge" / "mapped"


def _private_folder() -> Path:
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid"):
        status = folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
            raise OutputError(
                f"cache of mapped engines {folder}: others may change it; make it yours alone (chmod 700), or set "
                "XDG_CACHE_HOME to another folder"
            )
    return folder


def _intact(folder: Path) -> bool:
    """Whether every byte is still the one that was saved."""
    try:
        receipt = json.loads((folder / _RECEIPT).read_bytes())
        return isinstance(receipt, dict) and receipt == _hashes(folder)
    except (FileNotFoundError, ValueError):
        return False


def _hashes(folder: Path) -> dict[str, str]:
    hashes = {}
    for path in sorted(folder.iterdir()):
        if path.name != _RECEIPT:
            with path.open("rb") as file:
                hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _build(folder: Path, build: Callable[[Path, str], None]) -> None:
    fresh = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        build(fresh / _ENGINE, _WEIGHTS)
        (fresh / _RECEIPT).write_text(json.dumps(_hashes(fresh)))
        # Another process may have been first; what it left may be in use, and is as good if it is whole.
        if not _intact(folder):
            shutil.rmtree(folder, ignore_errors=True)
            try:
                fresh.rename(folder)
            except OSError:
                if not _intact(folder):
                    raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _processor() -> str:
    """What the packed layout depends on: the processor and the instructions it offers."""
    facts = probe_host()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{facts.cpu} {facts.architecture} {features}"
