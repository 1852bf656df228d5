"""Buffers through which a window slides: of layers whose tokens see the last few, a cache keeps no more than it must.

Such a buffer has room for the tokens that a window holds and for those of a run. Where the next run would not fit, the
tokens that its first one sees move to the front. They stay in their order, so that an engine reads a window as it reads
a whole text, from another place on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..inputs.arrays import Array

# Where the buffers of a row begin whose tokens are being moved: behind every text, so that nothing of it is reused.
_LOST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class SlidingWindow:
    """Of the layers of one cache whose tokens see ``seen`` tokens at most, themselves included. ``starts`` ``[rows]``
    int64 are the places in the text of the first token that the buffers of each row hold."""

    seen: int
    starts: Array

    @staticmethod
    def empty(seen: int, rows: int) -> SlidingWindow:
        """Of rows that hold nothing."""
        return SlidingWindow(seen, np.zeros(rows, np.int64))

    def part(self, start: int, stop: int) -> SlidingWindow:
        """Rows ``start`` to ``stop``, which is left out, on the same memory."""
        return SlidingWindow(self.seen, self.starts[start:stop])

    def reaches(self, row: int, position: int) -> bool:
        """Whether a token at ``position`` of the text would see all that it must."""
        return bool(self.starts[row] <= self._first_seen(position))

    def make_room(self, tensors: Sequence[Array], row: int, position: int, tokens: int, drafted: int = 0) -> None:
        """Room in ``tensors`` ``[rows, heads, places, size]`` for ``tokens`` of ``row`` from ``position`` of the text
        on. ``drafted`` tokens before them may be refused, so that what the first of those sees stays too. A text begins
        anew at position 0. An interruption leaves a row of which nothing is reused."""
        if position == 0:
            self.starts[row] = 0
        places = tensors[0].shape[2]
        if position + tokens - self.starts[row] <= places:
            return
        first = self._first_seen(position - drafted)
        moved, at = position - first, first - int(self.starts[row])
        assert at >= 0, "what a token sees is gone"
        assert moved + tokens <= places, "a run of more tokens than the buffers have room for"
        self.starts[row] = _LOST
        for tensor in tensors:
            tensor[row, :, :moved] = tensor[row, :, at : at + moved]
        self.starts[row] = first

    def copy_row(self, source: int, target: int) -> None:
        """The buffers of row ``target`` begin where those of ``source`` do."""
        self.starts[target] = self.starts[source]

    def swap_rows(self, one: int, other: int) -> None:
        """Exchanges where the buffers of two rows begin."""
        self.starts[[one, other]] = self.starts[[other, one]]

    def _first_seen(self, position: int) -> int:
        return max(0, position - self.seen + 1)
