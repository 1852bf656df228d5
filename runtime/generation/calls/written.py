"""Which tokens the places of a cache hold, and which engine wrote the keys of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....bundle.entries.engine_entry import EngineEntry

Ids = npt.NDArray[np.int64]


class Written:
    """Of ``places``, each with room for ``capacity`` tokens. The first ``lengths[place]`` are believed; what is behind
    them may be half written."""

    def __init__(self, places: int, capacity: int) -> None:
        self.lengths = [0] * places
        self._tokens: Ids = np.zeros((places, capacity), np.int64)
        self._by = np.zeros((places, capacity), np.int16)  # numbers of engines
        self._engines: list[EngineEntry] = []  # by number
        self._numbers: dict[str, int] = {}

    def at(self, place: int) -> tuple[int, ...]:
        """The tokens that ``place`` holds."""
        return tuple(self._tokens[place, : self.lengths[place]].tolist())

    def put(self, place: int, start: int, tokens: Sequence[int] | Ids, engine: EngineEntry) -> None:
        """``engine`` has written the keys of ``tokens`` from place ``start`` of a text on; not believed yet."""
        self._tokens[place, start : start + len(tokens)] = tokens
        self._by[place, start : start + len(tokens)] = self._number(engine)

    def extend(self, tokens: Sequence[int], engine: EngineEntry) -> None:
        """``engine`` has written one more of ``tokens`` at each of the first places, which is believed."""
        number = self._number(engine)
        for place, token in enumerate(tokens):  # in numpy's terms one row would take longer
            at = self.lengths[place]
            self._tokens[place, at], self._by[place, at] = token, number
            self.lengths[place] = at + 1

    def common(self, tokens: Ids, engine: EngineEntry, own: bool = False) -> list[int]:
        """With how many of ``tokens`` each place begins whose keys ``engine`` can read, or with ``own`` wrote."""
        found = [_common(self._tokens[place, :length], tokens) for place, length in enumerate(self.lengths)]
        readable = [other.id == engine.id if own else engine.can_continue(other) for other in self._engines]
        if all(readable):
            return found
        unread = ~np.array(readable)
        others = [np.flatnonzero(unread[self._by[place, :length]]) for place, length in enumerate(found)]
        return [int(other[0]) if len(other) else length for other, length in zip(others, found, strict=True)]

    def forget(self) -> None:
        """Nothing is believed any more."""
        self.lengths = [0] * len(self.lengths)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Place ``target`` has the first ``tokens`` of ``source``; not believed yet."""
        self._tokens[target, :tokens] = self._tokens[source, :tokens]
        self._by[target, :tokens] = self._by[source, :tokens]

    def swap(self, place: int, other: int) -> None:
        """Exchanges what two places hold, but for how much of it is believed."""
        self._tokens[[place, other]] = self._tokens[[other, place]]
        self._by[[place, other]] = self._by[[other, place]]

    def clear(self) -> None:
        """Gives its memory back."""
        self._tokens, self._by = self._tokens[:0].copy(), self._by[:0].copy()

    def _number(self, engine: EngineEntry) -> int:
        number = self._numbers.setdefault(engine.id, len(self._engines))
        if number == len(self._engines):
            self._engines.append(engine)
        return number


def _common(there: Ids, wanted: Ids) -> int:
    """How many tokens two rows begin with together."""
    shorter = min(len(there), len(wanted))
    differing = np.flatnonzero(there[:shorter] != wanted[:shorter])
    return int(differing[0]) if len(differing) else shorter
