"""Arrays at an address of a device's memory, as DLPack hands them from one library to another; no library is needed.

DLPack is a C structure in a Python capsule: an address, a shape, a type, a device. ONNX Runtime takes it without
copying.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

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
# What takers call when they are done, which may be after the interpreter has ended: a function of C that frees what it
# is given, and so the structure, which is the beginning of one block.
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
