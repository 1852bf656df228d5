"""Recurrent states of rows, which have every token in them that was read: a cache keeps them beside keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...bundle.entries.generation_entry import PAST, PRESENT
from ..inputs.arrays import Array

# How many tokens are in the states of a row while a run is under way, or once one was interrupted.
_LOST = -1


@dataclass(frozen=True)
class RowStates:
    """``tensors`` ``[rows, ...]`` float32, which a run reads, and ``after``, into which it writes what they become: a
    graph may read a state again after it has written the next one. ``tokens`` ``[rows]`` int64 says how many tokens
    the states of a row have read. A text begins anew at position 0."""

    tensors: tuple[Array, ...]
    after: tuple[Array, ...]
    tokens: Array

    @staticmethod
    def of(shapes: Sequence[Sequence[int]], rows: int) -> RowStates | None:
        """Those of rows that have read nothing; None where a model has none."""
        if not shapes:
            return None
        made = [[np.zeros((rows, *shape), np.float32) for shape in shapes] for _ in range(2)]
        return RowStates(tuple(made[0]), tuple(made[1]), np.zeros(rows, np.int64))

    @property
    def bytes(self) -> int:
        return 2 * sum(tensor.nbytes for tensor in self.tensors)

    def part(self, start: int, stop: int) -> RowStates:
        """Rows ``start`` to ``stop``, which is left out, on the same memory."""
        read, after = ([tensor[start:stop] for tensor in each] for each in (self.tensors, self.after))
        return RowStates(tuple(read), tuple(after), self.tokens[start:stop])

    def copy_row(self, source: int, target: int) -> None:
        """Makes the states of ``target`` those of ``source``."""
        self.tokens[target] = _LOST
        for tensor in self.tensors:
            tensor[target] = tensor[source]
        self.tokens[target] = self.tokens[source]

    def swap_rows(self, one: int, other: int) -> None:
        """Exchanges two rows."""
        mine, theirs = self.tokens[[one, other]]
        self.tokens[[one, other]] = _LOST
        for tensor in self.tensors:
            tensor[[one, other]] = tensor[[other, one]]
        self.tokens[[one, other]] = theirs, mine

    @property
    def read(self) -> Mapping[str, Array]:
        """Inputs of a run, by the names that engines have for them."""
        return {f"{PAST}state_{number}": tensor for number, tensor in enumerate(self.tensors)}

    @property
    def written(self) -> Mapping[str, Array]:
        """Outputs of a run, by the names that engines have for them."""
        return {f"{PRESENT}state_{number}": tensor for number, tensor in enumerate(self.after)}

    def stepping(self, call: Callable[[], None], positions: Array) -> Callable[[], None]:
        """A run by ``call`` of one new token of each row at ``positions`` ``[rows, 1]``, of which the states have all
        that are before it; they have read it then."""

        def run() -> None:
            at = positions[:, 0]
            self._begin(at == 0)
            assert not np.any((self.tokens != at) & (at != 0)), "the states of a row are those of another text"
            self.tokens[:] = _LOST
            call()
            for tensor, after in zip(self.tensors, self.after, strict=True):
                np.copyto(tensor, after)
            self.tokens[:] = at + 1

        return run

    def _begin(self, anew: Array) -> None:
        """Rows ``anew`` ``[rows]`` have read nothing."""
        if anew.any():
            for tensor in self.tensors:
                tensor[anew] = 0
