"""The weight store on a device: each tensor lies there once, and every engine's initializers are views of it.

A submodel's matrix is the beginning of the universal model's, and a segment reads whole tensors, so N engines need one
copy. A tensor goes over when the first engine that reads it opens, whole, so that wider submodels find it there too.

Views travel by DLPack, a C structure in a Python capsule: an address, a shape, a type, a device. ONNX Runtime takes it
without copying, and no library is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...bundle.files import FileIdentity
from ..graphs.initializers import Initializer
from ..graphs.weight_store import readable, span_with, tensor_spans
from ..inputs.arrays import Array
from .device import Device, SharedValues

# Kernels read up to this many bytes at once, from addresses that are multiples of it.
_ALIGNMENT_BYTES = 16
# Bytes of the file that are read at a time.
_CHUNK_BYTES = 64 * 2**20


class DeviceStore:
    """The tensors of one file of a store on one device, by its bytes that they are. Thread-safe under its device's
    lock."""

    def __init__(self, path: Path, device: Device) -> None:
        """Reads the header alone. Raises BundleCorruptError."""
        self._path, self._device = path, device
        with readable(path):
            self._spans = tensor_spans(path, FileIdentity.of(path.stat()))
        self._addresses: dict[tuple[int, int], int] = {}

    @property
    def bytes(self) -> int:
        """Bytes on the device so far."""
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
    """One engine's use of the file of a store at ``path`` on ``device``, which all engines of the process share.

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


# ``DLDeviceType``, by ONNX Runtime's names.
_DEVICE_CODES = {"cpu": 1, "cuda": 2}
_INT, _UINT, _FLOAT, _BFLOAT = 0, 1, 2, 4
# ``DLDataType``: code and bits. A bool travels as a byte, and ONNX Runtime asks the object whether it is one.
_DTYPE_CODES = {
    "float32": (_FLOAT, 32),
    "float16": (_FLOAT, 16),
    "bfloat16": (_BFLOAT, 16),
    "int8": (_INT, 8),
    "uint8": (_UINT, 8),
    "int32": (_INT, 32),
    "int64": (_INT, 64),
    "bool": (_UINT, 8),
}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("rank", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_allocate = ctypes.pythonapi.PyMem_RawMalloc
_allocate.restype = ctypes.c_void_p
_allocate.argtypes = (ctypes.c_size_t,)
# Destructor that takers call when they are done, which may be after the interpreter has ended: a function of C that
# frees what it is given, and so the structure, which is the beginning of one block.
_FREE_BLOCK = ctypes.cast(ctypes.pythonapi.PyMem_RawFree, ctypes.c_void_p).value
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@dataclass(frozen=True)
class DeviceView:
    """A contiguous array at ``address`` in the memory of a device (``kind`` and ``index``), which it does not own:
    whoever owns the memory must outlive whoever takes the view."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    kind: str
    index: int

    def __dlpack__(self, **_wishes: Any) -> object:
        """A capsule that must be taken; wishes for another device, version or a copy are for takers to check."""
        rank, size = len(self.shape), ctypes.sizeof(_Managed)
        block = _allocate(size + rank * ctypes.sizeof(ctypes.c_int64))
        if not block:
            raise MemoryError
        sizes = (ctypes.c_int64 * rank).from_address(block + size)
        sizes[:] = list(self.shape)
        code, bits = _DTYPE_CODES[self.dtype]
        managed = _Managed.from_address(block)
        managed.tensor = _Tensor(
            self.address,
            _Device(*self.__dlpack_device__()),
            rank,
            _Type(code, bits, 1),
            ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64)),
            None,  # rows follow each other without gaps
            0,
        )
        managed.context, managed.deleter = None, _FREE_BLOCK
        return _new_capsule(block, b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DEVICE_CODES[self.kind], self.index
