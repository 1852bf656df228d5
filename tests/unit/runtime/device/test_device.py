from __future__ import annotations

import pytest
from nestforge.runtime.device.device import DeviceArray, SharedValues


def test_rows_of_an_array_are_an_array_in_place() -> None:
    array = DeviceArray(1024, "float16", (6, 2, 3))
    assert (array.row_bytes, array.bytes) == (12, 72)
    assert array.rows(2, 5) == DeviceArray(1024 + 24, "float16", (3, 2, 3))


class Thing:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_all_users_get_one_and_the_last_closes_it() -> None:
    shared: SharedValues[str, Thing] = SharedValues()
    first = shared.take("a", Thing)
    assert shared.take("a", Thing) is first
    other = shared.take("b", Thing)
    shared.give("a")
    assert (first.closed, other.closed) == (0, 0)
    shared.give("a")
    assert (first.closed, other.closed) == (1, 0)
    assert shared.take("a", Thing) is not first


def test_what_cannot_be_made_is_not_kept() -> None:
    shared: SharedValues[str, Thing] = SharedValues()

    def fail() -> Thing:
        raise ValueError("none")

    with pytest.raises(ValueError, match="none"):
        shared.take("a", fail)
    assert isinstance(shared.take("a", Thing), Thing)
