"""Texts of a user's file, in an order that its own lines decide: any first part is a sample spread over the file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import InputError
from ..inputs.files import read_text_file


def keyed_texts(path: Path, error: Callable[[str], Exception]) -> list[tuple[bytes, str]]:
    """The different lines of a UTF-8 file that are not blank, without outer spaces, sorted by their SHA-256, with it.

    Raises ``error(message)`` for a file that ``read_text_file`` refuses.
    """
    return keyed(read_text_file(path, error).splitlines())


def keyed(texts: Sequence[str]) -> list[tuple[bytes, str]]:
    """The different ones of ``texts`` that are not blank, without outer spaces, sorted by their SHA-256, with it.

    Raises InputError for what is no text.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"text: expected a list of texts, got {texts!r:.80}")
    stripped = {text.strip() for text in texts} - {""}
    return sorted((hashlib.sha256(text.encode(errors="surrogatepass")).digest(), text) for text in stripped)
