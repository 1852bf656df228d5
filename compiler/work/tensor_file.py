"""A safetensors file: written tensor by tensor, and read as views of its pages, so that no copy of it is in memory."""

import ctypes
import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import numpy as np

from ...progress import Bytes, tell

METADATA = MappingProxyType({"format": "nestforge"})
# In the order in which safetensors lays tensors out, those of one type by name: the bytes are those that it writes.
_TYPES = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "I8", "U8", "BOOL")
_LETTERS = {"uint": "U", "int": "I", "float": "F", "bfloat": "BF", "bool": "BOOL"}
_mapped: WeakSet[mmap.mmap] = WeakSet()


@dataclass(frozen=True)
class Unmade:
    """A tensor of a known form; ``blocks`` makes its rows, some at a time."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    tensors: Mapping[str, np.ndarray | Unmade], path: Path, metadata: Mapping[str, str] = METADATA
) -> None:
    """Writes a safetensors file, with ``metadata`` (one entry: several have no order) beside its tensors, and
    waits until it has reached the disk. Each tensor is made when its place in the file has come. Raises OSError."""
    head, end = _head(tensors, metadata), 0
    total = sum(tensor.nbytes for tensor in tensors.values())
    with path.open("wb") as stream:
        stream.write(head)
        for name in in_order(tensors):
            tensor, end = tensors[name], end + tensors[name].nbytes
            for block in tensor.blocks() if isinstance(tensor, Unmade) else (tensor,):
                assert block.dtype == tensor.dtype, name
                stream.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
                tell(Bytes(stream.tell() - len(head)), Bytes(total))
            assert stream.tell() == len(head) + end, name
        stream.flush()
        os.fsync(stream.fileno())


def has_tensors(tensors: Mapping[str, np.ndarray | Unmade], path: Path, metadata: Mapping[str, str]) -> bool:
    """Whether ``write_tensors`` of them ended at ``path``: its header and its size are those. Raises OSError."""
    head = _head(tensors, metadata)
    with path.open("rb") as stream:
        size = len(head) + sum(tensor.nbytes for tensor in tensors.values())
        return stream.read(len(head)) == head and path.stat().st_size == size


def in_order(tensors: Mapping[str, np.ndarray | Unmade]) -> list[str]:
    """Their names in the order in which a file has them."""
    return sorted(tensors, key=lambda name: (_TYPES.index(_kind(tensors[name].dtype)), name))


def _head(tensors: Mapping[str, np.ndarray | Unmade], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in in_order(tensors):
        begin, end = end, end + tensors[name].nbytes
        kind, shape = _kind(tensors[name].dtype), list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _kind(dtype: np.dtype[Any]) -> str:
    """Name of a type in safetensors, such as ``BF16``."""
    name: str = dtype.name.rstrip("0123456789")
    return f"{_LETTERS[name]}{dtype.name.removeprefix(name)}"


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a file that nobody writes to; a write to them would end the process."""
    with path.open("rb") as stream:
        pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    _mapped.add(pages)
    return pages


def release_pages() -> None:
    """Takes the files of ``map_file``, and what is free of glibc's heaps, out of this process's memory; what is read of
    the files again comes from the disk, or from the system's cache of it."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    for pages in list(_mapped):
        pages.madvise(mmap.MADV_DONTNEED)
