"""The text of a user's file, whose end is known before it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import InputError
from ...outside_file import open_file

MAX_TEXT_BYTES = 2**30
_BLOCK_BYTES = 2**20
_EXPECTED = "expected a UTF-8 text file with one text per line"


def read_text_file(path: Path, error: Callable[[str], Exception] = InputError) -> str:
    """What a UTF-8 file of at most ``MAX_TEXT_BYTES`` holds.

    Raises ``error(message)`` for a file that is missing, larger or not UTF-8, and for folders, pipes and devices, which
    it never waits for.
    """
    try:
        with open_file(path, lambda problem: error(f"{problem}; {_EXPECTED}")) as file:
            raw = bytearray()  # to be read at once, memory for the most allowed would be taken
            while len(raw) <= MAX_TEXT_BYTES and (block := file.read(_BLOCK_BYTES)):
                raw += block
    except OSError as failure:
        raise error(f"{path}: cannot be read ({failure.strerror or failure}); {_EXPECTED}") from failure
    if len(raw) > MAX_TEXT_BYTES:
        raise error(f"{path}: more than the {MAX_TEXT_BYTES} bytes allowed; split it")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(f"{path}: line {raw.count(10, 0, failure.start) + 1}: not UTF-8; {_EXPECTED}") from failure
