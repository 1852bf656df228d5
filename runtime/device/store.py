"""The weight store on a device: each tensor lies there once, and every engine's initializers are views of it.

A submodel's matrix is the beginning of the universal model's, and a segment reads whole tensors, so N engines need one
copy. A tensor goes over when the first engine that reads it opens, whole, so that wider submodels find it there too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ...bundle.regular_file import FileIdentity
from ..graphs.initializers import Initializer
from ..graphs.weight_store import readable, span_with, tensor_spans
from ..inputs.arrays import Array
from .device import Device
from .dlpack import DeviceView
from .shared_values import SharedValues

# Kernels read up to this many bytes at once, from addresses that are multiples of it.
_ALIGNMENT_BYTES = 16
# What is read of the file at a time.
_CHUNK_BYTES = 64 * 2**20


class DeviceStore:
    """The tensors of one store on one device, by the bytes of the file that they are. Thread-safe under its device's
    lock."""

    def __init__(self, path: Path, device: Device) -> None:
        """Reads the header alone. Raises BundleCorruptError."""
        self._path, self._device = path, device
        with readable(path):
            self._spans = tensor_spans(path, FileIdentity.of(path.stat()))
        self._addresses: dict[tuple[int, int], int] = {}

    @property
    def bytes(self) -> int:
        """What lies on the device so far."""
        return sum(end - begin for begin, end in self._addresses)

    def views(self, initializers: Iterable[Initializer], where: str) -> dict[str, DeviceView]:
        """A view for each initializer by name; tensors that are not on the device yet go over.

        Raises BundleCorruptError for one that lies in no tensor, BundleIncompatibleError for too little memory.
        """
        device = self._device
        with device.lock:
            found = {
                one.name: DeviceView(self._address(one, where), one.dtype, one.shape, device.kind, device.index)
                for one in initializers
            }
            device.wait()
        return found

    def close(self) -> None:
        """Frees all of it; no engine that has views may run afterwards."""
        with self._device.lock:
            for address in self._addresses.values():
                self._device.free(address)
            self._addresses.clear()

    def _address(self, one: Initializer, where: str) -> int:
        begin, end = span_with(one, self._spans, self._path, where)
        inside = one.offset - begin
        if inside % _ALIGNMENT_BYTES:  # such as a row of stacked matrices with few, odd columns
            begin, end, inside = one.offset, one.offset + one.bytes, 0
        if (begin, end) not in self._addresses:
            self._addresses[begin, end] = self._upload(begin, end)
        return self._addresses[begin, end] + inside

    def _upload(self, begin: int, end: int) -> int:
        address = self._device.allocate(end - begin)
        try:
            for at in range(begin, end, _CHUNK_BYTES):
                self._device.to_device(address + at - begin, self._chunk(at, min(_CHUNK_BYTES, end - at)))
                self._device.wait()
        except BaseException:
            self._device.free(address)
            raise
        return address

    def _chunk(self, begin: int, size: int) -> Array:
        """Read, not mapped: a file that is cut short meanwhile is then an error, and does not end the process."""
        with readable(self._path):
            chunk = np.fromfile(self._path, np.uint8, size, offset=begin)
            if chunk.size < size:
                raise ValueError("cut short")
        return chunk


_stores: SharedValues[tuple[object, ...], DeviceStore] = SharedValues()


class StoreUse:
    """One engine's use of the store at ``path`` on ``device``, which all engines of the process share.

    A file that was replaced is another store: engines that are open keep the tensors that they opened with.
    """

    def __init__(self, path: Path, device: Device) -> None:
        """Raises BundleCorruptError."""
        with readable(path):
            self._key = (FileIdentity.of(path.stat()), id(device))
        self.store = _stores.take(self._key, lambda: DeviceStore(path, device))

    def close(self) -> None:
        """Ends the use; the last one frees the tensors."""
        _stores.give(self._key)
