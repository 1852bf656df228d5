"""Text that every development environment has: the Python sources of its packages. Read, never imported."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("_vendor", "__pycache__", "__phello__"),  # vendored code is another package's
}


def module_files(folder: Path) -> list[Path]:
    """Every Python file below ``folder``, sorted, without tests and vendored packages."""
    files = folder.rglob("*.py")
    return sorted(path for path in files if not _SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts))


def place_of(name: str) -> int:
    """0 to 99 by the hash of ``name``: what decides its part of a split, on every machine alike."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100
