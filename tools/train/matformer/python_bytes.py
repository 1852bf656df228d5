"""Bytes of the standard library's sources, split so that no text is in two parts.

The hash of a top-level module's or package's name decides the part of all its files. A block of lines (what blank
lines enclose) that stands in more than one of them is dropped from the held-out parts: licences, and code that was
copied. Generated tables are left out, as nobody wrote them and they would fill a part.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from ....errors import CheckpointError
from ..python_sources import module_files, place_of
from .data import Rows

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")

_HELD_OUT_PLACES = {"validation": range(10), "test": range(10, 20)}  # of every hundred modules
_GENERATED = re.compile(r"encodings|pydoc_data|_sysconfigdata.*")
_BLOCK = 80  # bytes; shorter blocks, such as `if __name__ == ...`, are idiom


@dataclass(frozen=True)
class PythonBytes:
    """``parts`` as text; ``window`` bytes a row, ``held_out`` rows of each held-out part, spread evenly over it."""

    parts: dict[Part, bytes]
    window: int
    held_out: int

    @property
    def validation(self) -> Rows:
        return self._spread("validation")

    @property
    def test(self) -> Rows:
        return self._spread("test")

    @property
    def facts(self) -> dict[str, object]:
        sizes = {part: len(text) for part, text in self.parts.items()}
        digest = hashlib.sha256(b"".join(hashlib.sha256(self.parts[part]).digest() for part in PARTS))
        return {"bytes": sizes, "window": self.window, "held_out_rows": self.held_out, "sha256": digest.hexdigest()}

    def batches(self, size: int, steps: int, seed: int) -> Iterator[Rows]:
        """Windows that begin anywhere in the training part."""
        chance = torch.Generator().manual_seed(seed)
        text = self._train
        for _ in range(steps):
            yield _windows(text, torch.randint(len(text) - self.window, (size,), generator=chance), self.window)

    def _spread(self, part: Part) -> Rows:
        text = _as_ids(self.parts[part])
        last = len(text) - self.window - 1
        return _windows(text, torch.linspace(0, last, self.held_out, dtype=torch.float64).long(), self.window)

    @cached_property
    def _train(self) -> torch.Tensor:
        return _as_ids(self.parts["train"])


def read_python_bytes(window: int, held_out: int, stdlib: Path | None = None) -> PythonBytes:
    """The sources below ``stdlib``, by default the running Python's. The same sources give the same data.

    Raises CheckpointError if a part would be shorter than its rows.
    """
    folder = stdlib or Path(sysconfig.get_path("stdlib"))
    units: dict[str, list[bytes]] = defaultdict(list)
    for file in module_files(folder):
        name = file.relative_to(folder).parts[0].removesuffix(".py")
        text = file.read_bytes()
        if not _GENERATED.fullmatch(name) and _is_utf8(text):
            units[name].append(text.strip() + b"\n\n")
    shared = _shared_blocks(units)
    parts: dict[Part, bytes] = {}
    for part in PARTS:
        texts = [text for name in sorted(units) if part_of(name) == part for text in units[name]]
        parts[part] = b"".join(texts if part == "train" else (_without(text, shared) for text in texts))
        least = (window + 1) * (1 if part == "train" else held_out)
        if len(parts[part]) < least:
            raise CheckpointError(
                f"{folder}: {len(parts[part])} bytes of Python for the {part} part, expected at least {least}; "
                "train with a Python that has the sources of its standard library"
            )
    return PythonBytes(parts, window, held_out)


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


def _as_ids(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, window: int) -> Rows:
    rows = torch.stack([text[start : start + window + 1] for start in starts.tolist()]).long()  # [N, window + 1]
    return Rows(rows[:, :-1], rows[:, 1:])
