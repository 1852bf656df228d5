"""The processor in the place of a GPU: everything is done when it is asked for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import psutil
from nestforge.runtime.device.device import ALIGNMENT
from nestforge.runtime.inputs.arrays import Array

T = TypeVar("T")


class HostDevice:
    """See ``Device``."""

    kind = "cpu"
    index = 0

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._memory: dict[int, Array] = {}

    @property
    def allocated_bytes(self) -> int:
        """Memory that ``allocate`` handed out and ``free`` did not take back."""
        return sum(block.nbytes - ALIGNMENT for block in self._memory.values())

    def allocate(self, size: int) -> int:
        room = np.empty(size + ALIGNMENT, np.uint8)
        address = room.ctypes.data + -room.ctypes.data % ALIGNMENT
        self._memory[address] = room
        return address

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def free(self, address: int) -> None:
        del self._memory[address]

    def staging(self, size: int) -> Array:
        return np.empty(size, np.uint8)

    def free_staging(self, staging: Array) -> None: ...

    def to_device(self, address: int, source: Array) -> None:
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def to_host(self, target: Array, address: int) -> None:
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * source_pitch, width)

    def clear_rows(self, target: int, pitch: int, width: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memset(target + row * pitch, 0, width)

    def wait(self) -> None: ...

    def perform(self, work: Callable[[], T]) -> T:
        return work()

    def end_capture(self) -> None: ...

    def release(self) -> None: ...
