"""Keys and values that an encoder made of prompts, in memory of the host's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ....bundle.entries.generation_entry import GenerationEntry
from ...engines.runner import Runner
from ...inputs.arrays import Array
from .any_source import AnySource, source_shapes


def read_source(runner: Runner, entry: GenerationEntry, ids: Array) -> list[Array]:
    """What the open ``runner`` of an encoder makes of a prompt ``ids`` ``[N]`` int64: per layer keys
    ``[1, heads, size, N]`` and values ``[1, heads, N, size]`` in turn."""
    names = [spec.name for spec in entry.encoder_interface[1]]
    found = [np.empty(shape, np.float32) for shape in source_shapes(entry, 1, len(ids))]
    runner.bind({"input_ids": np.ascontiguousarray(ids[None])}, dict(zip(names, found, strict=True)))()
    return found


@dataclass(frozen=True)
class Source(AnySource[Array]):
    """See ``AnySource``."""

    @staticmethod
    def empty(entry: GenerationEntry, rows: int, room: int) -> Source:
        """For prompts of up to ``room`` tokens."""
        shapes = source_shapes(entry, rows, room)
        return Source(tuple(np.zeros(shape, np.float32) for shape in shapes), np.ones(rows, np.int64))

    def part(self, start: int, stop: int) -> Source:
        """See ``AnySource.part``."""
        return Source(tuple(tensor[start:stop] for tensor in self.tensors), self.lengths[start:stop])

    def laid_out(self, heads: Sequence[int], sizes: Sequence[int]) -> Source:
        """See ``AnySource.laid_out``."""
        found = []
        for place, (kept, size) in enumerate(zip(heads, sizes, strict=True)):
            keys, values = self.tensors[2 * place : 2 * place + 2]
            found += [
                first_of(keys, (len(keys), kept, size, keys.shape[3])),
                first_of(values, (len(values), kept, values.shape[2], size)),
            ]
        return Source(tuple(found), self.lengths)

    def swap_rows(self, one: int, other: int) -> None:
        """See ``AnySource.swap_rows``."""
        for tensor in (*self.tensors, self.lengths):
            tensor[[one, other]] = tensor[[other, one]]

    def read(self, row: int, runner: Runner, entry: GenerationEntry, ids: Array) -> None:
        """See ``AnySource.read``."""
        self.write(row, read_source(runner, entry, ids))

    def write(self, row: int, found: Sequence[Array]) -> None:
        """Makes a row what ``read_source`` ``found`` of its prompt."""
        length = found[0].shape[3]
        for place, tensor in enumerate(self.tensors):
            (tensor[row, :, :, :length] if place % 2 == 0 else tensor[row, :, :length])[...] = found[place][0]
        self.lengths[row] = length


def first_of(tensor: Array, shape: tuple[int, ...]) -> Array:
    """The first numbers of ``tensor``, on its memory, as an array of ``shape``."""
    found: Array = tensor.reshape(-1)[: prod(shape)].reshape(shape)
    return found
