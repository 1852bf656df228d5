"""What a task gives to training: batches that a seed decides, and rows that nothing is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Rows:
    """``inputs`` as the model takes them, ``targets`` int64: the next byte ``[N, S]``, or the class ``[N]``."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Data(Protocol):
    """One task's data. ``validation`` chooses recipes; ``test`` is for figures alone."""

    @property
    def validation(self) -> Rows: ...

    @property
    def test(self) -> Rows: ...

    @property
    def facts(self) -> dict[str, object]:
        """Sizes and a hash of all parts: what makes it the same data."""
        ...

    def batches(self, size: int, steps: int, seed: int) -> Iterator[Rows]:
        """``steps`` batches of ``size`` rows of the training part."""
        ...
