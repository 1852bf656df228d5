"""Memory where engines compute, and the few things done with it.

Work on a device is queued and done in order: what is copied to it may be read by the run that is queued next. Nothing
here waits but ``wait``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, Protocol, TypeVar

import numpy as np

from ..inputs.arrays import Array

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound="Closable")
# Alignment of cudaMalloc, and so the most that a kernel may ask of an address.
ALIGNMENT = 256
# Keys and values are float32 with four dimensions, of which this one counts tokens: of the keys of prompts the last.
TOKENS, TOKENS_OF_KEYS = 2, 3
_ITEM_BYTES = 4


class DeviceGraph(Protocol):
    """Work that was captured once, started by one call; see ``Device.capture``."""

    def launch(self) -> None: ...

    def close(self) -> None:
        """Frees it; it must not be running."""
        ...


class DeviceCall(Protocol):
    """A run of one engine on memory of the caller's, as often as the call is made; see ``DeviceRunner.bind_device``."""

    def __call__(self) -> None: ...

    def close(self) -> None:
        """Gives back what the call keeps, such as a CUDA graph, once all that was queued is done; another call raises
        BundleError. A call that is closed already, as all are with their runner, is left alone."""
        ...


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
        """Result or error of ``work``, done by the one thread that runs sessions here; called under ``lock``."""
        ...

    def capture(self, work: Callable[[], object]) -> DeviceGraph:
        """One graph of what ``work`` queues, by the thread of ``perform``; nothing runs. Raises BundleError with the
        reason where it is not the device's work alone."""
        ...

    def start(self, graph: DeviceGraph) -> None:
        """Queues it."""
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


class Closable(Protocol):
    """An entry of ``SharedValues``."""

    def close(self) -> None:
        """Called once, after its last user gave it back."""
        ...


class SharedValues(Generic[Key, Value]):
    """Every ``take`` is followed by one ``give`` of the same key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[Key, tuple[Value, int]] = {}

    def take(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of ``key``, by ``make`` where there is none; what that raises is raised."""
        with self._lock:
            value, users = self._users.get(key) or (make(), 0)
            self._users[key] = (value, users + 1)
            return value

    def give(self, key: Key) -> None:
        """Ends one use."""
        with self._lock:
            value, users = self._users.pop(key)
            if users > 1:
                self._users[key] = (value, users - 1)
            else:
                value.close()


def empty_tensors(shapes: Iterable[tuple[int, ...]], device: Device) -> tuple[DeviceArray, ...]:
    """Arrays of zeros: attention reads every place, and what is masked must be a number. Raises
    BundleIncompatibleError where the device has no memory for them; it keeps none then."""
    tensors: list[DeviceArray] = []
    try:
        with device.lock:
            for shape in shapes:
                line, lines = prod(shape[2:]) * _ITEM_BYTES, prod(shape[:2])
                tensors.append(DeviceArray(device.allocate(lines * line), "float32", shape))
                device.clear_rows(tensors[-1].address, line, line, lines)
    except BaseException:
        free_tensors(tensors, device)
        raise
    return tuple(tensors)


def free_tensors(tensors: Iterable[DeviceArray], device: Device) -> None:
    """Gives their memory back."""
    with device.lock:
        for tensor in tensors:
            device.free(tensor.address)


def copy_tokens(device: Device, target: DeviceArray, source: DeviceArray, tokens: int, dim: int = TOKENS) -> None:
    """Makes the first ``tokens`` of ``target`` those of ``source``, which differs in their number alone, dimension
    ``dim``."""
    item = prod(source.shape[dim + 1 :]) * _ITEM_BYTES
    if width := tokens * item:
        pitches = (target.shape[dim] * item, source.shape[dim] * item)
        device.copy_rows(target.address, pitches[0], source.address, pitches[1], width, prod(source.shape[:dim]))


def swap_rows(device: Device, tensors: Sequence[tuple[DeviceArray, int]], one: int, other: int, tokens: int) -> None:
    """Exchanges the first ``tokens`` of two rows of each of ``tensors``, whose tokens are the dimension beside it.
    Raises BundleIncompatibleError where the device has no memory for a row."""
    if not tokens:
        return
    with device.lock:
        shapes = [(1, *tensor.shape[1:dim], tokens, *tensor.shape[dim + 1 :]) for tensor, dim in tensors]
        between = device.allocate(max(map(prod, shapes)) * _ITEM_BYTES)
        try:
            for (tensor, dim), shape in zip(tensors, shapes, strict=True):
                first, second = tensor.rows(one, one + 1), tensor.rows(other, other + 1)
                kept = DeviceArray(between, tensor.dtype, shape)
                copy_tokens(device, kept, first, tokens, dim)
                copy_tokens(device, first, second, tokens, dim)
                copy_tokens(device, second, kept, tokens, dim)
            device.wait()  # where an interruption comes, it is still given back
        finally:
            device.free(between)
