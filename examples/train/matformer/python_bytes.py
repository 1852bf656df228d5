"""Bytes of the standard library's sources: windows of a text in three parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from ..python_parts import PARTS, Part, read_python_parts
from .data import Rows


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
    least: dict[Part, int] = {part: (window + 1) * (1 if part == "train" else held_out) for part in PARTS}
    return PythonBytes(read_python_parts(least, stdlib), window, held_out)


def _as_ids(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, window: int) -> Rows:
    rows = torch.stack([text[start : start + window + 1] for start in starts.tolist()]).long()  # [N, window + 1]
    return Rows(rows[:, :-1], rows[:, 1:])
