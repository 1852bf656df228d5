"""What sources have in common, wherever they lie: what a decoder reads of the prompts behind which it writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

from ....bundle.entries.generation_entry import SOURCE_LENGTHS, GenerationEntry
from ...device.device import DeviceArray
from ...engines.runner import Runner
from ...inputs.arrays import Array

Tensor = TypeVar("Tensor", Array, DeviceArray)


@dataclass(frozen=True)
class AnySource(ABC, Generic[Tensor]):
    """Keys and values that an encoder made of prompts, once: ``tensors`` are keys ``[rows, heads, size, room]`` and
    values ``[rows, heads, room, size]`` float32 of each layer in turn; of a row the first ``lengths`` ``[rows]`` int64
    count, which lie on the host.

    Rows of it are sources too, on the same memory, and so are the first heads of one row.
    """

    tensors: tuple[Tensor, ...]
    lengths: Array

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return sum(prod(tensor.shape) * 4 for tensor in self.tensors)

    @property
    def heads(self) -> tuple[int, ...]:
        """Of each layer."""
        return tuple(tensor.shape[1] for tensor in self.tensors[::2])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of a head of each layer."""
        return tuple(tensor.shape[2] for tensor in self.tensors[::2])

    @property
    def counts(self) -> Mapping[str, Array]:
        """What engines take beside keys and values, by name."""
        return {SOURCE_LENGTHS: self.lengths}

    def named(self) -> Mapping[str, Tensor]:
        """Keys and values by the names that engines have for them."""
        names = [f"source_{kind}_{layer}" for layer in range(len(self.tensors) // 2) for kind in ("key", "value")]
        return dict(zip(names, self.tensors, strict=True))

    @abstractmethod
    def part(self, start: int, stop: int) -> AnySource[Tensor]:
        """Rows ``start`` to ``stop``, which is left out."""

    @abstractmethod
    def laid_out(self, heads: Sequence[int], sizes: Sequence[int]) -> AnySource[Tensor]:
        """As ``AnyCache.laid_out``."""

    @abstractmethod
    def swap_rows(self, one: int, other: int) -> None:
        """Exchanges two rows."""

    @abstractmethod
    def read(self, row: int, runner: Runner, entry: GenerationEntry, ids: Array) -> None:
        """Makes a row what the open ``runner`` of an encoder makes of a prompt ``ids`` ``[N]`` int64; ``entry`` has the
        heads of its submodel."""


def source_shapes(entry: GenerationEntry, rows: int, tokens: int) -> Iterator[tuple[int, ...]]:
    """Of keys and values of each layer in turn, for prompts of so many ``tokens``."""
    for layer in entry.source_layers:
        yield rows, layer.heads, layer.size, tokens
        yield rows, layer.heads, tokens, layer.size
