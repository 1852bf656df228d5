from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from nestforge.runtime.exits.row_moves import Move, side_by_side, to_front


@given(st.sets(st.integers(0, 40), min_size=1).map(sorted))
def test_rows_come_to_the_front_and_those_there_stay(positions: list[int]) -> None:
    origin, moves = to_front(positions)
    count = len(positions)
    assert sorted(origin) == positions
    assert all(origin[place] == place for place in positions if place < count)
    rows = list(range(41))
    for target, source, number in moves:
        assert target + number <= count <= source  # no copy overlaps another
        rows[target : target + number] = rows[source : source + number]
    assert rows[:count] == origin


def test_rows_that_lie_together_go_in_one_copy() -> None:
    assert to_front([0, 4, 5, 6]) == ([0, 4, 5, 6], [Move(1, 4, 3)])
    assert to_front([1, 6, 8, 9]) == ([6, 1, 8, 9], [Move(0, 6, 1), Move(2, 8, 2)])
    assert to_front([0, 1, 2]) == ([0, 1, 2], [])
    assert side_by_side(range(5), [0, 1, 4, 5, 6]) == [Move(0, 0, 2), Move(2, 4, 3)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_moves_are_the_pairs_in_order(pairs: list[tuple[int, int]]) -> None:
    moves = side_by_side([target for target, _ in pairs], [source for _, source in pairs])
    assert [(t + n, s + n) for t, s, count in moves for n in range(count)] == pairs
