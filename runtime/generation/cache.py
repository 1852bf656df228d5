"""The keys and values that a language model keeps of the tokens it has seen, in memory of the caller's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..bundle.entries.generation_entry import CachedLayer
from ..inputs.arrays import Array
from .source import Source


@dataclass(frozen=True)
class Cache:
    """``tensors`` are keys and values of each layer in turn, ``[rows, heads, capacity, size]`` float32 each. Behind an
    encoder each row also has what that made of its prompt, in ``source``.

    Rows of it are caches too, on the same memory, and so are the first heads of one row.
    """

    tensors: tuple[Array, ...]
    source: Source | None = None

    @staticmethod
    def empty(layers: Sequence[CachedLayer], rows: int, capacity: int, source: Source | None = None) -> Cache:
        """Room for ``capacity`` tokens in each of ``rows`` rows; the system gives its pages as they are written."""
        shapes = [(rows, layer.heads, capacity, layer.size) for layer in layers for _ in ("key", "value")]
        return Cache(tuple(np.zeros(shape, np.float32) for shape in shapes), source)

    @property
    def rows(self) -> int:
        return len(self.tensors[0])

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for."""
        return int(self.tensors[0].shape[2])

    @property
    def heads(self) -> tuple[int, ...]:
        """Of each layer."""
        return tuple(tensor.shape[1] for tensor in self.tensors[::2])

    @property
    def bytes(self) -> int:
        """What it takes once every token is written."""
        return sum(tensor.nbytes for tensor in self.tensors) + (0 if self.source is None else self.source.bytes)

    def part(self, start: int, stop: int) -> Cache:
        """Rows ``start`` to ``stop``, which is left out."""
        source = None if self.source is None else self.source.part(start, stop)
        return Cache(tuple(tensor[start:stop] for tensor in self.tensors), source)

    def with_heads(self, heads: Sequence[int]) -> Cache:
        """The same memory for that many heads of each layer, at most what there are. Of one row they are its first;
        of several what was written is lost."""
        tensors = [
            tensor.reshape(-1)[: len(tensor) * kept * tensor[0, 0].size].reshape(len(tensor), kept, *tensor.shape[2:])
            for tensor, kept in zip(self.tensors, (kept for kept in heads for _ in ("key", "value")), strict=True)
        ]
        return Cache(tuple(tensors), self.source)

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """Makes the first ``tokens`` of row ``target`` those of row ``source``."""
        for tensor in self.tensors:
            tensor[target, :, :tokens] = tensor[source, :, :tokens]

    def swap_rows(self, one: int, other: int, tokens: int) -> None:
        """Exchanges the first ``tokens`` of two rows."""
        for tensor in self.tensors:
            moved = tensor[one, :, :tokens].copy()
            tensor[one, :, :tokens] = tensor[other, :, :tokens]
            tensor[other, :, :tokens] = moved
        if self.source is not None:
            self.source.swap_rows(one, other)

    @property
    def inputs(self) -> Mapping[str, Array]:
        """Everything that an engine reads of it, by name."""
        return {**({} if self.source is None else self.source.named()), **self.named("past")}

    def named(self, prefix: str) -> Mapping[str, Array]:
        """The tensors by the names that engines have for them: ``past`` or ``present``."""
        return dict(zip(self._names(prefix), self.tensors, strict=True))

    def _names(self, prefix: str) -> Iterator[str]:
        for layer in range(len(self.tensors) // 2):
            yield from (f"{prefix}_key_{layer}", f"{prefix}_value_{layer}")
