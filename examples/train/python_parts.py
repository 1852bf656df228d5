"""The standard library's sources, split so that no text is in two parts.

The hash of a top-level module's or package's name decides the part of all its files. A block of lines (what blank
lines enclose) that is in more than one of them is dropped from the held-out parts: licences, and code that was
copied. Generated tables are left out, as nobody wrote them and they would fill a part.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from ...errors import CheckpointError
from .python_sources import module_files, place_of

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")

_HELD_OUT_PLACES = {"validation": range(10), "test": range(10, 20)}  # of every hundred modules
_GENERATED = re.compile(r"encodings|pydoc_data|_sysconfigdata.*")
_BLOCK = 80  # bytes; shorter blocks, such as `if __name__ == ...`, are idiom


def read_python_parts(
    least: Mapping[Part, int], stdlib: Path | None = None, tidy: Callable[[bytes], bytes] = bytes
) -> dict[Part, bytes]:
    """The sources below ``stdlib``, by default the running Python's. The same sources give the same parts.

    ``tidy`` is done to the text of every file before anything else.
    Raises CheckpointError if a part would have fewer bytes than its ``least``.
    """
    folder = stdlib or Path(sysconfig.get_path("stdlib"))
    units: dict[str, list[bytes]] = defaultdict(list)
    for file in module_files(folder):
        name = file.relative_to(folder).parts[0].removesuffix(".py")
        text = file.read_bytes()
        if not _GENERATED.fullmatch(name) and _is_utf8(text):
            units[name].append(tidy(text).strip() + b"\n\n")
    shared = _shared_blocks(units)
    parts: dict[Part, bytes] = {}
    for part in PARTS:
        texts = [text for name in sorted(units) if part_of(name) == part for text in units[name]]
        parts[part] = b"".join(texts if part == "train" else (_without(text, shared) for text in texts))
        if len(parts[part]) < least[part]:
            raise CheckpointError(
                f"{folder}: {len(parts[part])} bytes of Python for the {part} part, expected at least {least[part]}; "
                "train with a Python that has the sources of its standard library"
            )
    return parts


def part_of(module: str) -> Part:
    """The part of every file of a top-level ``module``."""
    place = place_of(module)
    for part in PARTS[1:]:
        if place in _HELD_OUT_PLACES[part]:
            return part
    return "train"


def _shared_blocks(units: dict[str, list[bytes]]) -> set[bytes]:
    found: Counter[bytes] = Counter()
    for texts in units.values():
        found.update({block for text in texts for block in _blocks(text)})
    return {block for block, count in found.items() if count > 1 and len(block) >= _BLOCK}


def _blocks(text: bytes) -> list[bytes]:
    return [block.strip() for block in re.split(rb"\n\s*\n", text)]


def _without(text: bytes, blocks: set[bytes]) -> bytes:
    return b"".join(piece for piece in re.split(rb"(?<=\n)(?=\s*\n)", text) if piece.strip() not in blocks)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
