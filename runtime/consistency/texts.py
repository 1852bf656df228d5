"""Texts of a user's file, in an order that its own lines decide: any first part is a sample spread over the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

MAX_TEXT_BYTES = 256 * 2**20


def keyed_texts(
    path: Path, error: Callable[[str], Exception], max_bytes: int = MAX_TEXT_BYTES
) -> list[tuple[bytes, str]]:
    """The different lines of a UTF-8 file that are not blank, without outer spaces, sorted by their SHA-256, with it.

    Raises ``error(message)`` for a missing, oversized or undecodable file.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise error(f"{path}: {path.stat().st_size} bytes, more than the {max_bytes} allowed")
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        raise error(f"{path}: expected a UTF-8 text file with one text per line ({failure})") from failure
    return sorted((hashlib.sha256(text.encode()).digest(), text) for text in {line.strip() for line in lines} - {""})
