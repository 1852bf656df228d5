"""What a request gets back: outputs, and which engine answered, why, and how its input was changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..elastic import Bucket
from .arrays import Array
from .residency import Residency


@dataclass(frozen=True)
class Padding:
    """The input's own shape and the bucket it was filled up to; outputs are cut back to the former."""

    given: Bucket
    filled: Bucket

    def __str__(self) -> str:
        return f"{self.given.label} -> {self.filled.label}"


class Timings(NamedTuple):
    """Milliseconds. ``open`` is more than 0 where this request was the first to need its engine."""

    encode: float
    dispatch: float
    open: float
    run: float


@dataclass(frozen=True, repr=False, eq=False)
class Answer:
    """Outputs by name, owned by the caller, and how they came about.

    ``truncated`` holds the rows of a text input that were cut to fit. ``reason`` says why this submodel was chosen.
    """

    outputs: Mapping[str, Array]
    submodel: str
    engine: str
    bucket: Bucket
    residency: Residency
    reason: str
    padding: Padding | None
    truncated: tuple[int, ...]
    timings: Timings

    def __getitem__(self, name: str) -> Array:
        return self.outputs[name]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in self.outputs.items())
        padding = f", padded {self.padding}" if self.padding else ""
        truncated = f", {len(self.truncated)} truncated" if self.truncated else ""
        return f"Answer({shapes}; {self.engine}, {self.timings.run:.2f} ms{padding}{truncated}; {self.reason})"
