"""The tensors of a task, or of the base: read into memory once, every byte hashed; or merged into an engine's weights.

They are small beside the weights, and no file is mapped: a task that is replaced on disk changes nothing here. Merged,
``W + B A`` (LoRA, arXiv 2106.09685, section 4.1) is summed in float64 and rounded once; the scale is in ``B``. A slice
of the sum is the sum of the slices: rows of ``W`` go with rows of ``B``, of its transpose with those of ``A``'s.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BufferedReader, BytesIO
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ...bundle.device_files.task_index import TaskEntry
from ...bundle.entries.task_entry import LORA_A, LORA_B, MergedTask, TasksEntry, TaskTensor
from ...bundle.files import FETCH_AGAIN, FileIdentity, identity_at, regular_file
from ...bundle.open_bundle import Bundle
from ...errors import BundleCorruptError
from ..inputs.arrays import Array
from .initializers import Initializer, files_of
from .weight_store import read_header, readable

_FLOAT32_BYTES = 4
_WEIGHT, _TRANSPOSED = ".weight", ".T"
_bases: WeakValueDictionary[tuple[FileIdentity | None, ...], TaskTensors] = WeakValueDictionary()
_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class TaskTensors:
    """Float32 arrays by the names of ``TasksEntry.tensors``, in their shapes, of task ``name``; None is the base.

    ``submodels`` (ids) are those that may answer, all where it is None."""

    name: str | None
    arrays: Mapping[str, Array]
    submodels: tuple[str, ...] | None = None


def read_task_tensors(bundle: Bundle, task: TaskEntry) -> TaskTensors:
    """The tensors of one task of ``bundle``. Raises BundleCorruptError for other bytes than the bundle lists."""
    assert bundle.manifest.tasks is not None
    path = bundle.path / task.file
    with regular_file(path) as (file, identity):
        if identity.size != task.bytes:
            raise BundleCorruptError(f"{path}: {identity.size} bytes, expected {task.bytes}; {FETCH_AGAIN}")
        data = bytearray(task.bytes)
        file.readinto(data)
    digest = hashlib.sha256(data).hexdigest()
    if digest != task.sha256:
        raise BundleCorruptError(f"{path}: sha256 {digest}, expected {task.sha256}; {FETCH_AGAIN}")
    with readable(path):
        return replace(task_tensors(task.name, data, bundle.manifest.tasks, path), submodels=task.submodels)


def task_tensors(
    name: str, data: bytes | bytearray, tasks: TasksEntry, path: Path = Path("task.safetensors")
) -> TaskTensors:
    """The tensors in ``data``, the content of a task's file. Raises BundleCorruptError where one is missing."""
    held = data if isinstance(data, bytearray) else bytearray(data)  # ONNX Runtime takes arrays that may be written
    begin, header = read_header(BytesIO(held), len(held), path)
    arrays = {
        tensor: np.frombuffer(held, np.dtype("<f4"), prod(shape), begin + place).reshape(shape)
        for tensor, shape, place in _places(tasks.tensors, header, len(held) - begin, path)
    }
    return TaskTensors(name, arrays)


def base_tensors(bundle: Bundle) -> TaskTensors:
    """The base's own, from the weight store; all engines of the process that read them have one copy.

    Raises BundleCorruptError where the store does not have them.
    """
    tasks, names = bundle.manifest.tasks, bundle.manifest.weight_names
    assert tasks is not None
    with bundle.held(*names), _lock:
        key = tuple(identity_at(bundle.path / name) for name in names)
        found = _bases.get(key)
        if found is None:
            arrays = dict[str, Array]()
            for path in bundle.weights:
                with regular_file(path) as (file, identity), readable(path):
                    arrays |= _read(file, identity.size, tasks, path)
            for tensor in tasks.tensors:
                if tensor.name not in arrays:
                    raise _other(tensor, bundle.path)
            found = _bases[key] = TaskTensors(None, arrays)
        return found


def _read(file: BufferedReader, size: int, tasks: TasksEntry, path: Path) -> Iterator[tuple[str, Array]]:
    begin, header = read_header(file, size, path)
    held = [tensor for tensor in tasks.tensors if tensor.name in header]
    for name, shape, place in _places(held, header, size - begin, path):
        file.seek(begin + place)
        data = bytearray(prod(shape) * _FLOAT32_BYTES)
        if file.readinto(data) != len(data):
            raise ValueError("ends within a tensor")
        yield name, np.frombuffer(data, np.dtype("<f4")).reshape(shape)


def _places(
    tensors: Iterable[TaskTensor], header: Any, size: int, path: Path
) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, shape and first byte of every tensor, behind the header. Raises BundleCorruptError for another one."""
    found = []
    for tensor in tensors:
        entry = header.get(tensor.name)
        if entry is None or entry["dtype"] != "F32" or tuple(entry["shape"]) != tensor.shape:
            raise _other(tensor, path)
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size or end - begin != prod(tensor.shape) * _FLOAT32_BYTES:
            raise ValueError(f"{tensor.name}: outside the file")
        found.append((tensor.name, tensor.shape, begin))
    return found


def _other(tensor: TaskTensor, path: Path) -> BundleCorruptError:
    return BundleCorruptError(
        f"{path}: tensor {tensor.name:.80} is missing or none of F32 {list(tensor.shape)}; {FETCH_AGAIN}"
    )


def merged_weights(bundle: Bundle, initializers: Iterable[Initializer]) -> dict[str, Array]:
    """The values of ``initializers``, those of one engine that lie in the weight store, the ones that the task in the
    bundle's weights changes, by name; none without one.

    Raises BundleCorruptError where the store cannot be read, or the engine has other shapes than the task.
    """
    task = bundle.merged
    if task is None or not task.arrays:
        return {}
    read = tuple(initializers)
    with bundle.held(*files_of(read)):
        merged = {one.name: _merged(bundle.file(one.file), task, one) for one in read}
    return {name: array for name, array in merged.items() if array is not None}


def _merged(path: Path, task: MergedTask, one: Initializer) -> Array | None:
    """One initializer with the first steps of what the task has of it."""
    own = task.arrays.get(one.name)
    if own is not None:
        return np.ascontiguousarray(_first(own, one))
    change = _change(task, one.name) if task.kind == "lora" else None
    if change is None:
        return None
    change = _first(change, one)
    with readable(path), path.open("rb") as file:
        file.seek(one.offset)
        base = np.fromfile(file, np.dtype("<f4"), one.bytes // 4).reshape(one.shape)
    return (base.astype(np.float64) + change).astype(np.float32)


def _first(array: np.ndarray, one: Initializer) -> np.ndarray:
    """The first steps of ``array``, as many as the initializer has. Raises BundleCorruptError for another shape."""
    found: np.ndarray = array[: one.shape[0]] if one.shape else array
    if (found.shape, one.dtype) != (one.shape, "float32"):
        raise BundleCorruptError(
            f"initializer {one.name:.80}: {one.dtype} {list(one.shape)}, the task has float32 {list(array.shape)} "
            f"there; {FETCH_AGAIN}"
        )
    return found


def _change(task: MergedTask, name: str) -> np.ndarray | None:
    """The matrix that a pair beside the weight ``name`` adds to it, in float64 and laid out as the weight is; None
    without one."""
    plain = name.removesuffix(_TRANSPOSED)
    module = plain.removesuffix(_WEIGHT)
    down, up = _laid_out(task, module + LORA_A), _laid_out(task, module + LORA_B)
    if plain == module or down is None or up is None:
        return None
    if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1]:
        raise BundleCorruptError(f"the pair beside {module:.80} is of {list(down.shape)} and {list(up.shape)}")
    return down.T @ up.T if name != plain else up @ down


def _laid_out(task: MergedTask, name: str) -> np.ndarray | None:
    """A matrix of a pair in float64, ``A`` as [r, in] and ``B`` as [out, r]."""
    if name in task.arrays:
        return task.arrays[name].astype(np.float64)
    turned = task.arrays.get(name + _TRANSPOSED)
    return None if turned is None else turned.T.astype(np.float64)
