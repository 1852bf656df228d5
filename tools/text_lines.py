"""A text file as the commands of retrieval read it: one text a line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError


@dataclass(frozen=True)
class TextLines:
    """The texts in the file's order, and how many ``blank`` lines were left out."""

    texts: tuple[str, ...]
    blank: int


def read_text_lines(path: Path) -> TextLines:
    """Reads a UTF-8 file; a text is a line without the white space around it, and repeated texts stay.

    Raises InputError for what ``read_text_file`` refuses, and for a file without any text.
    """
    from ..runtime.inputs.files import read_text_file

    text = read_text_file(path)
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")] if text else []
    texts = tuple(line for line in lines if line)
    if not texts:
        raise InputError(f"{path}: has no texts; expected one a line")
    return TextLines(texts, len(lines) - len(texts))
