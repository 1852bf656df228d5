"""Windows of the standard library's sources in three parts: each byte's next one, or bytes that are masked."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from .python_text import PARTS, Part, read_python_parts

MASK = 256  # the id behind those of all bytes
_MASKED, _OTHER = 0.8, 0.1  # of the chosen positions: hidden, another byte of the batch; the rest stay as they are
_HELD_OUT_SEEDS = {"validation": 1, "test": 2}
_INDENTATION = re.compile(rb"(?m)^[ \t]+")


@dataclass(frozen=True)
class Rows:
    """``inputs`` as the model takes them, ``targets`` int64: the next byte ``[N, S]``, or the class ``[N]``."""

    inputs: torch.Tensor
    targets: torch.Tensor


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
        return _facts(self.parts, self.window, self.held_out)

    def batches(self, size: int, steps: int, seed: int) -> Iterator[Rows]:
        """Windows that begin anywhere in the training part."""
        chance = torch.Generator().manual_seed(seed)
        text = self._train
        for _ in range(steps):
            yield _with_next(text, torch.randint(len(text) - self.window, (size,), generator=chance), self.window)

    def _spread(self, part: Part) -> Rows:
        text = _as_ids(self.parts[part])
        last = len(text) - self.window - 1
        return _with_next(text, torch.linspace(0, last, self.held_out, dtype=torch.float64).long(), self.window)

    @cached_property
    def _train(self) -> torch.Tensor:
        return _as_ids(self.parts["train"])


def read_python_bytes(window: int, held_out: int, stdlib: Path | None = None) -> PythonBytes:
    """The sources below ``stdlib``, by default the running Python's. The same sources give the same data.

    Raises CheckpointError if a part would be shorter than its rows.
    """
    least: dict[Part, int] = {part: (window + 1) * (1 if part == "train" else held_out) for part in PARTS}
    return PythonBytes(read_python_parts(least, stdlib), window, held_out)


@dataclass(frozen=True)
class MaskedRows:
    """``inputs`` [N, S] int64, whose ``positions`` [N, K] (rising) held ``targets`` [N, K]."""

    inputs: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def part(self, start: int, stop: int) -> MaskedRows:
        """These rows alone."""
        return MaskedRows(self.inputs[start:stop], self.positions[start:stop], self.targets[start:stop])


@dataclass(frozen=True)
class MaskedBytes:
    """``parts`` as text; ``window`` bytes a row with ``share`` of them chosen, ``held_out`` rows of each held-out part.

    Held-out rows are spread evenly over their part and always hide the same bytes.
    """

    parts: dict[Part, bytes]
    window: int
    share: float
    held_out: int

    @cached_property
    def validation(self) -> MaskedRows:
        return self._spread("validation")

    @cached_property
    def test(self) -> MaskedRows:
        return self._spread("test")

    @property
    def facts(self) -> dict[str, object]:
        return _facts(self.parts, self.window, self.held_out, share=self.share)

    @property
    def commonest(self) -> float:
        """Share of the test targets that are the commonest byte: the accuracy of knowing nothing."""
        return self.test.targets.flatten().bincount().max().item() / self.test.targets.numel()

    def batches(self, size: int, steps: int, seed: int) -> Iterator[MaskedRows]:
        """``steps`` batches of windows that begin anywhere in the training part; the seed decides all of them."""
        chance = torch.Generator().manual_seed(seed)
        text = _as_ids(self.parts["train"])
        for _ in range(steps):
            starts = torch.randint(len(text) - self.window + 1, (size,), generator=chance)
            yield masked(_windows(text, starts, self.window), self.share, chance)

    def _spread(self, part: Literal["validation", "test"]) -> MaskedRows:
        text = _as_ids(self.parts[part])
        starts = torch.linspace(0, len(text) - self.window, self.held_out, dtype=torch.float64).long()
        chance = torch.Generator().manual_seed(_HELD_OUT_SEEDS[part])
        return masked(_windows(text, starts, self.window), self.share, chance)


def read_masked_bytes(window: int, share: float, held_out: int, stdlib: Path | None = None) -> MaskedBytes:
    """The sources below ``stdlib``, by default the running Python's. The same sources give the same data.

    Raises CheckpointError if a part would be shorter than its rows.
    """
    least: dict[Part, int] = {part: window * (1 if part == "train" else held_out) for part in PARTS}
    return MaskedBytes(read_python_parts(least, stdlib, _without_indentation), window, share, held_out)


def masked(rows: torch.Tensor, share: float, chance: torch.Generator) -> MaskedRows:
    """Chooses ``share`` of the positions of each of ``rows`` [N, S]: 80 % of them become MASK, 10 % another byte."""
    count = max(1, round(share * rows.shape[1]))
    positions = torch.rand(rows.shape, generator=chance).argsort(1)[:, :count].sort(1).values  # [N, K]
    targets = rows.gather(1, positions)
    others = rows.flatten()[torch.randint(rows.numel(), positions.shape, generator=chance)]
    fate = torch.rand(positions.shape, generator=chance)
    put = torch.where(fate < _MASKED, MASK, torch.where(fate < _MASKED + _OTHER, others, targets))
    return MaskedRows(rows.scatter(1, positions, put), positions, targets)


def _without_indentation(text: bytes) -> bytes:
    return _INDENTATION.sub(b"", text)


def _facts(parts: Mapping[Part, bytes], window: int, held_out: int, **more: object) -> dict[str, object]:
    sizes = {part: len(text) for part, text in parts.items()}
    digest = hashlib.sha256(b"".join(hashlib.sha256(parts[part]).digest() for part in PARTS))
    return {"bytes": sizes, "window": window, **more, "held_out_rows": held_out, "sha256": digest.hexdigest()}


def _as_ids(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, window: int) -> torch.Tensor:
    return torch.stack([text[start : start + window] for start in starts.tolist()]).long()  # [N, window]


def _with_next(text: torch.Tensor, starts: torch.Tensor, window: int) -> Rows:
    rows = _windows(text, starts, window + 1)
    return Rows(rows[:, :-1], rows[:, 1:])
