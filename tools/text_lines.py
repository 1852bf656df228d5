"""A text file as the commands of retrieval read it: one text a line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError

MAX_TEXT_BYTES = 2**30


@dataclass(frozen=True)
class TextLines:
    """The texts in the file's order, and how many ``blank`` lines were left out."""

    texts: tuple[str, ...]
    blank: int


def read_text_lines(path: Path) -> TextLines:
    """Reads a UTF-8 file; a text is a line without the white space around it, and repeated texts stay.

    Raises InputError for a missing, oversized or undecodable file, and for one without any text.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
    except OSError as failure:
        raise InputError(f"{path}: cannot be read ({failure.strerror or failure})") from failure
    if len(raw) > MAX_TEXT_BYTES:
        raise InputError(f"{path}: more than the {MAX_TEXT_BYTES} bytes allowed; split it")
    try:
        lines = [line.strip() for line in raw.decode("utf-8").removesuffix("\n").split("\n")] if raw else []
    except UnicodeDecodeError as failure:
        raise InputError(f"{path}: line {raw[: failure.start].count(10) + 1}: not UTF-8") from failure
    texts = tuple(line for line in lines if line)
    if not texts:
        raise InputError(f"{path}: has no texts; expected one a line")
    return TextLines(texts, len(lines) - len(texts))
