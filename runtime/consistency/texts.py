"""Texts of a user's file, in an order that its own lines decide: any first part is a sample spread over the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from ..inputs.text_file import read_text_file


def keyed_texts(path: Path, error: Callable[[str], Exception]) -> list[tuple[bytes, str]]:
    """The different lines of a UTF-8 file that are not blank, without outer spaces, sorted by their SHA-256, with it.

    Raises ``error(message)`` for a file that ``read_text_file`` refuses.
    """
    lines = read_text_file(path, error).splitlines()
    return sorted((hashlib.sha256(text.encode()).digest(), text) for text in {line.strip() for line in lines} - {""})
