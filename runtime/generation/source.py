"""What a decoder reads of the prompts behind which it writes: keys and values that an encoder made of them, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ..bundle.entries.generation_entry import GenerationEntry
from ..engines.runner import Runner
from ..inputs.arrays import Array


def read_source(runner: Runner, entry: GenerationEntry, ids: Array) -> list[Array]:
    """What the open ``runner`` of an encoder makes of a prompt ``ids`` ``[N]`` int64: per layer keys
    ``[1, heads, size, N]`` and values ``[1, heads, N, size]`` in turn."""
    names = [spec.name for spec in entry.encoder_interface[1]]
    keys = [(1, layer.heads, layer.size, len(ids)) for layer in entry.source_layers]
    values = [(1, layer.heads, len(ids), layer.size) for layer in entry.source_layers]
    found = [np.empty(shape, np.float32) for pair in zip(keys, values, strict=True) for shape in pair]
    runner.bind({"input_ids": np.ascontiguousarray(ids[None])}, dict(zip(names, found, strict=True)))()
    return found


@dataclass(frozen=True)
class Source:
    """``tensors`` are keys ``[rows, heads, size, room]`` and values ``[rows, heads, room, size]`` float32 of each layer
    in turn; of a row the first ``lengths`` ``[rows]`` int64 count. Rows of it are sources too, on the same memory.
    """

    tensors: tuple[Array, ...]
    lengths: Array

    @staticmethod
    def empty(entry: GenerationEntry, rows: int, room: int) -> Source:
        """For prompts of up to ``room`` tokens."""
        keys = [(rows, layer.heads, layer.size, room) for layer in entry.source_layers]
        values = [(rows, layer.heads, room, layer.size) for layer in entry.source_layers]
        shapes = [shape for pair in zip(keys, values, strict=True) for shape in pair]
        return Source(tuple(np.zeros(shape, np.float32) for shape in shapes), np.ones(rows, np.int64))

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def heads(self) -> tuple[int, ...]:
        """Of each layer."""
        return tuple(tensor.shape[1] for tensor in self.tensors[::2])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of a head of each layer."""
        return tuple(tensor.shape[2] for tensor in self.tensors[::2])

    def laid_out(self, heads: Sequence[int], sizes: Sequence[int]) -> Source:
        """As ``Cache.laid_out``."""
        found = []
        for place, (kept, size) in enumerate(zip(heads, sizes, strict=True)):
            keys, values = self.tensors[2 * place : 2 * place + 2]
            found += [
                first_of(keys, (len(keys), kept, size, keys.shape[3])),
                first_of(values, (len(values), kept, values.shape[2], size)),
            ]
        return Source(tuple(found), self.lengths)

    def part(self, start: int, stop: int) -> Source:
        """Rows ``start`` to ``stop``, which is left out."""
        return Source(tuple(tensor[start:stop] for tensor in self.tensors), self.lengths[start:stop])

    def write(self, row: int, found: Sequence[Array]) -> None:
        """Makes a row what ``read_source`` ``found`` of its prompt."""
        length = found[0].shape[3]
        for place, tensor in enumerate(self.tensors):
            (tensor[row, :, :, :length] if place % 2 == 0 else tensor[row, :, :length])[...] = found[place][0]
        self.lengths[row] = length

    def swap_rows(self, one: int, other: int) -> None:
        """Exchanges two rows."""
        for tensor in (*self.tensors, self.lengths):
            tensor[[one, other]] = tensor[[other, one]]

    def named(self) -> Mapping[str, Array]:
        """The arrays by the names that engines have for them."""
        names = [f"source_{kind}_{layer}" for layer in range(len(self.tensors) // 2) for kind in ("key", "value")]
        return {"source_lengths": self.lengths, **dict(zip(names, self.tensors, strict=True))}


def first_of(tensor: Array, shape: tuple[int, ...]) -> Array:
    """The first numbers of ``tensor``, on its memory, as an array of ``shape``."""
    found: Array = tensor.reshape(-1)[: prod(shape)].reshape(shape)
    return found
