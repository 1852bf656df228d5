"""Which rows move where when some leave a batch: a pure decision, in as few copies as rows lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """``rows`` rows from ``source`` on go to ``target`` on."""

    target: int
    source: int
    rows: int


def to_front(positions: Sequence[int]) -> tuple[list[int], list[Move]]:
    """The rows at ``positions`` (rising) in place at the front: rows that lie there stay, others fill the gaps.

    Returns the position that each row came from, and the moves, whose sources and targets do not overlap.
    """
    count = len(positions)
    origin = list(range(count))
    kept = [position for position in positions if position < count]
    free = sorted(set(range(count)).difference(kept))
    movers = list(positions[len(kept) :])
    for place, mover in zip(free, movers, strict=True):
        origin[place] = mover
    return origin, side_by_side(free, movers)


def side_by_side(targets: Sequence[int], sources: Sequence[int]) -> list[Move]:
    """One move for each run of rows that are consecutive on both sides."""
    moves: list[Move] = []
    for target, source in zip(targets, sources, strict=True):
        if moves:
            last = moves[-1]
            if (target, source) == (last.target + last.rows, last.source + last.rows):
                moves[-1] = Move(last.target, last.source, last.rows + 1)
                continue
        moves.append(Move(target, source, 1))
    return moves
