"""Memory where engines compute, and the few things done with it; the processor's own memory is one such device.

Work on a device is queued and done in order: what is copied to it may be read by the run that is queued next. Nothing
here waits but ``wait``. Code that runs on this protocol is the same for a GPU and for the processor, which tests use.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeVar

import numpy as np
import psutil

from ..inputs.arrays import Array

T = TypeVar("T")

# What cudaMalloc aligns to, and so the most that a kernel may ask of an address.
ALIGNMENT = 256


class Device(Protocol):
    """One device of this process. Addresses are bytes of its memory; ``lock`` is held while work is queued."""

    @property
    def kind(self) -> str:
        """``cpu`` or ``cuda``, as ONNX Runtime names it."""
        ...

    @property
    def index(self) -> int: ...

    @property
    def lock(self) -> threading.RLock: ...

    def allocate(self, size: int) -> int:
        """The address of ``size`` bytes, aligned to ALIGNMENT. Raises BundleIncompatibleError where none are left."""
        ...

    def free_bytes(self) -> int:
        """How much of its memory nobody uses."""
        ...

    def free(self, address: int) -> None:
        """Gives back what ``allocate`` returned; no work that uses it may be queued."""
        ...

    def staging(self, size: int) -> Array:
        """``size`` bytes of the host's memory from which, and to which, copies go fastest (uint8)."""
        ...

    def free_staging(self, staging: Array) -> None:
        """Gives back what ``staging`` returned; no view of it may be used afterwards."""
        ...

    def to_device(self, address: int, source: Array) -> None:
        """Copies a contiguous array over; it must stay as it is until ``wait``."""
        ...

    def to_host(self, target: Array, address: int) -> None:
        """Copies back into a contiguous array, which holds the values after ``wait``."""
        ...

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """Copies the first ``width`` bytes of ``rows`` rows that lie ``pitch`` bytes apart; rows must not overlap."""
        ...

    def clear_rows(self, target: int, pitch: int, width: int, rows: int) -> None:
        """Sets the first ``width`` bytes of ``rows`` rows that lie ``pitch`` bytes apart to 0."""
        ...

    def wait(self) -> None:
        """Until all that was queued is done, under ``lock``. Raises BundleError if some of it failed."""
        ...

    def perform(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises, done by the one thread that runs sessions here; called under ``lock``."""
        ...

    def end_capture(self) -> None:
        """Puts an end to a capture that a session began and did not finish, and to the errors that it left."""
        ...

    def release(self) -> None:
        """Ends one use of it; the last one closes it."""
        ...


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous array in a device's memory."""

    address: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.row_bytes

    def rows(self, begin: int, end: int) -> DeviceArray:
        """Entries ``begin`` to ``end`` of the first dimension, in place."""
        return DeviceArray(self.address + begin * self.row_bytes, self.dtype, (end - begin, *self.shape[1:]))


class HostDevice:
    """The processor as a device: everything is done when it is asked for."""

    kind = "cpu"
    index = 0

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._memory: dict[int, Array] = {}

    @property
    def allocated_bytes(self) -> int:
        """What ``allocate`` handed out and ``free`` did not take back."""
        return sum(block.nbytes - ALIGNMENT for block in self._memory.values())

    def allocate(self, size: int) -> int:
        """See ``Device.allocate``."""
        room = np.empty(size + ALIGNMENT, np.uint8)
        address = room.ctypes.data + -room.ctypes.data % ALIGNMENT
        self._memory[address] = room
        return address

    def free_bytes(self) -> int:
        """See ``Device.free_bytes``."""
        return int(psutil.virtual_memory().available)

    def free(self, address: int) -> None:
        """See ``Device.free``."""
        del self._memory[address]

    def staging(self, size: int) -> Array:
        """See ``Device.staging``."""
        return np.empty(size, np.uint8)

    def free_staging(self, staging: Array) -> None:
        """See ``Device.free_staging``: the garbage collector does it."""

    def to_device(self, address: int, source: Array) -> None:
        """See ``Device.to_device``."""
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def to_host(self, target: Array, address: int) -> None:
        """See ``Device.to_host``."""
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """See ``Device.copy_rows``."""
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * source_pitch, width)

    def clear_rows(self, target: int, pitch: int, width: int, rows: int) -> None:
        """See ``Device.clear_rows``."""
        for row in range(rows):
            ctypes.memset(target + row * pitch, 0, width)

    def wait(self) -> None:
        """See ``Device.wait``."""

    def perform(self, work: Callable[[], T]) -> T:
        """See ``Device.perform``: sessions on the processor keep nothing for a thread."""
        return work()

    def end_capture(self) -> None:
        """See ``Device.end_capture``."""

    def release(self) -> None:
        """See ``Device.release``."""
