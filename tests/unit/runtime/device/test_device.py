"""The processor as a device; test_cuda_device.py asks the same of a GPU that a stand-in plays."""

from __future__ import annotations

import numpy as np
import pytest
from nestforge.runtime.device.device import ALIGNMENT, DeviceArray, SharedValues
from support.fake_gpu import HostDevice


def test_rows_move_and_are_cleared_within_the_device() -> None:
    device = HostDevice()
    before = device.allocate(12)
    after = device.allocate(20)
    assert before % ALIGNMENT == after % ALIGNMENT == 0
    device.to_device(before, np.arange(12, dtype=np.uint8))
    device.to_device(after, np.full(20, 99, np.uint8))
    device.copy_rows(after, 5, before + 4, 4, 3, 2)  # rows 1 and 2 of [3, 4], their first 3 columns, into [4, 5]
    device.clear_rows(after + 3, 5, 2, 2)
    device.clear_rows(after + 10, 5, 5, 1)
    found = np.empty(20, np.uint8)
    device.to_host(found, after)
    device.wait()
    assert found.reshape(4, 5).tolist() == [[4, 5, 6, 0, 0], [8, 9, 10, 0, 0], [0] * 5, [99] * 5]
    assert device.allocated_bytes == 32
    device.free(before)
    device.free(after)
    assert device.allocated_bytes == 0


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
