"""Windows of the standard library's sources in three parts: each byte's next one, or bytes that are masked."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import torch

from .python_text import PARTS, Part, read_python_parts

MASK = 256  # the id behind those of all bytes
_MASKED, _OTHER = 0.8, 0.1  # of the chosen positions: hidden, another byte of the batch; the rest stay as they are
_HELD_OUT_SEEDS: dict[Part, int] = {"validation": 1, "test": 2}
_INDENTATION = re.compile(rb"(?m)^[ \t]+")


@dataclass(frozen=True)
class Rows:
    """``inputs`` as the model takes them, ``targets`` int64: the next byte ``[N, S]``, or the class ``[N]``."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def parts(self, size: int) -> Iterator[Rows]:
        """``size`` of these at a time."""
        yield from map(Rows, torch.split(self.inputs, size), torch.split(self.targets, size))

    def asked(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` [N, S, V] for the targets: all."""
        return logits


R = TypeVar("R")


@dataclass(frozen=True)
class Windows(ABC, Generic[R]):
    """``parts`` as text; ``window`` bytes a row, ``held_out`` rows of each held-out part, spread evenly over it."""

    parts: dict[Part, bytes]
    window: int
    held_out: int

    @cached_property
    def validation(self) -> R:
        return self._spread("validation")

    @cached_property
    def test(self) -> R:
        return self._spread("test")

    @property
    def facts(self) -> dict[str, object]:
        sizes = {part: len(text) for part, text in self.parts.items()}
        digest = hashlib.sha256(b"".join(hashlib.sha256(self.parts[part]).digest() for part in PARTS)).hexdigest()
        return {"bytes": sizes, "window": self.window, "held_out_rows": self.held_out, "sha256": digest}

    @abstractmethod
    def batches(self, size: int, steps: int, seed: int) -> Iterator[R]:
        """``steps`` batches of windows that begin anywhere in the training part; the seed decides all of them."""

    @abstractmethod
    def _spread(self, part: Part) -> R: ...

    @cached_property
    def _train(self) -> torch.Tensor:
        return _as_ids(self.parts["train"])


@dataclass(frozen=True)
class PythonBytes(Windows[Rows]):
    """Windows whose targets are the bytes behind each one."""

    def batches(self, size: int, steps: int, seed: int) -> Iterator[Rows]:
        chance = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            starts = torch.randint(len(self._train) - self.window, (size,), generator=chance)
            yield _with_next(self._train, starts, self.window)

    def _spread(self, part: Part) -> Rows:
        text = _as_ids(self.parts[part])
        last = len(text) - self.window - 1
        return _with_next(text, torch.linspace(0, last, self.held_out, dtype=torch.float64).long(), self.window)


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

    def parts(self, size: int) -> Iterator[MaskedRows]:
        """``size`` of these at a time."""
        split = (torch.split(one, size) for one in (self.inputs, self.positions, self.targets))
        yield from map(MaskedRows, *split)

    def asked(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` [N, S, V] for the targets, [N, K, V]."""
        return logits.gather(1, self.positions[..., None].expand(-1, -1, logits.shape[2]))


@dataclass(frozen=True)
class MaskedBytes(Windows[MaskedRows]):
    """Windows with ``share`` of their bytes chosen; held-out rows always hide the same ones."""

    share: float

    @property
    def facts(self) -> dict[str, object]:
        return {**super().facts, "share": self.share}

    @property
    def commonest(self) -> float:
        """Share of the test targets that are the commonest byte: the accuracy of knowing nothing."""
        return self.test.targets.flatten().bincount().max().item() / self.test.targets.numel()

    def batches(self, size: int, steps: int, seed: int) -> Iterator[MaskedRows]:
        chance = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            starts = torch.randint(len(self._train) - self.window + 1, (size,), generator=chance)
            yield masked(_windows(self._train, starts, self.window), self.share, chance)

    def _spread(self, part: Part) -> MaskedRows:
        text = _as_ids(self.parts[part])
        starts = torch.linspace(0, len(text) - self.window, self.held_out, dtype=torch.float64).long()
        chance = torch.Generator().manual_seed(_HELD_OUT_SEEDS[part])
        return masked(_windows(text, starts, self.window), self.share, chance)


def read_masked_bytes(window: int, share: float, held_out: int, stdlib: Path | None = None) -> MaskedBytes:
    """The sources below ``stdlib``, by default the running Python's. The same sources give the same data.

    Raises CheckpointError if a part would be shorter than its rows.
    """
    least: dict[Part, int] = {part: window * (1 if part == "train" else held_out) for part in PARTS}
    return MaskedBytes(
        read_python_parts(least, stdlib, lambda text: _INDENTATION.sub(b"", text)), window, held_out, share
    )


def masked(rows: torch.Tensor, share: float, chance: torch.Generator) -> MaskedRows:
    """Chooses ``share`` of the positions of each of ``rows`` [N, S]: 80 % of them become MASK, 10 % another byte."""
    count = max(1, round(share * rows.shape[1]))
    positions = torch.rand(rows.shape, generator=chance).argsort(1)[:, :count].sort(1).values  # [N, K]
    targets = rows.gather(1, positions)
    others = rows.flatten()[torch.randint(rows.numel(), positions.shape, generator=chance)]
    fate = torch.rand(positions.shape, generator=chance)
    put = torch.where(fate < _MASKED, MASK, torch.where(fate < _MASKED + _OTHER, others, targets))
    return MaskedRows(rows.scatter(1, positions, put), positions, targets)


def _as_ids(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, window: int) -> torch.Tensor:
    return torch.stack([text[start : start + window] for start in starts.tolist()]).long()  # [N, window]


def _with_next(text: torch.Tensor, starts: torch.Tensor, window: int) -> Rows:
    rows = _windows(text, starts, window + 1)
    return Rows(rows[:, :-1], rows[:, 1:])
