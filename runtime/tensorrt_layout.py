"""Where an engine's inputs and outputs lie on the device, and whether arrays and plans fit: pure decisions.

All of them share one block of device memory and one of page-locked host memory, at the same offsets, inputs first: so
one copy brings all inputs over, and each output comes back by itself if it is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ..elastic import Bucket
from .arrays import Array
from .manifest import TensorSpec

# What cudaMalloc aligns to, and so the most that a kernel may ask of an address.
ALIGNMENT = 256

# Names of TensorRT's data types, by those of the manifest. Its own table for numpy knows no narrow types and raises.
DTYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "int64": "INT64",
    "int32": "INT32",
    "int8": "INT8",
    "uint8": "UINT8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Slot:
    """One tensor of an engine: ``bytes`` from ``offset`` in both blocks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int

    def misfit(self, array: Array) -> str | None:
        """Why ``array`` cannot be copied to or from here as it lies in memory, or None."""
        if str(array.dtype) == self.dtype and array.shape == self.shape and array.flags.c_contiguous:
            return None
        strides = "" if array.flags.c_contiguous else " with strides"
        return (
            f"{self.name}: expected contiguous {self.dtype} {list(self.shape)}, "
            f"got {array.dtype} {list(array.shape)}{strides}"
        )


@dataclass(frozen=True)
class Layout:
    """Slots by name; the first ``input_bytes`` of the ``bytes`` of a block are the inputs'."""

    inputs: Mapping[str, Slot]
    outputs: Mapping[str, Slot]
    input_bytes: int
    bytes: int

    def misfit(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> str | None:
        """Why a run from ``feeds`` into ``outputs`` is impossible, or None; an output may be left out."""
        for kind, slots, arrays in (("input", self.inputs, feeds), ("output", self.outputs, outputs)):
            for name, array in arrays.items():
                if name not in slots:
                    return f"has no {kind} {name!r}; it has {', '.join(slots)}"
                if problem := slots[name].misfit(array):
                    return problem
        if missing := sorted(self.inputs.keys() - feeds.keys()):
            return f"no array for input {', '.join(missing)}"
        return None


@dataclass(frozen=True)
class PlanTensor:
    """One input or output as a plan states it; ``dtype`` is TensorRT's name, ``shape`` has -1 where it is open."""

    name: str
    is_input: bool
    dtype: str
    shape: tuple[int, ...]
    on_device: bool


def layout_of(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], bucket: Bucket) -> Layout:
    """The slots of an engine at ``bucket``."""
    position = 0
    slots: list[Slot] = []
    for spec in (*inputs, *outputs):
        shape = spec.shape(bucket)
        size = prod(shape) * np.dtype(spec.dtype).itemsize
        slots.append(Slot(spec.name, spec.dtype, shape, position, size))
        position += -(-size // ALIGNMENT) * ALIGNMENT
    first_output = slots[len(inputs)].offset if outputs else position
    named = [(slot.name, slot) for slot in slots]
    return Layout(dict(named[: len(inputs)]), dict(named[len(inputs) :]), first_output, position)


def plan_problem(layout: Layout, found: Sequence[PlanTensor]) -> str | None:
    """Why a plan with these inputs and outputs is not the manifest's engine, or None."""
    for kind, is_input, slots in (("inputs", True, layout.inputs), ("outputs", False, layout.outputs)):
        have = {t.name: (t.dtype, t.shape) for t in found if t.is_input is is_input}
        want = {slot.name: (DTYPES[slot.dtype], slot.shape) for slot in slots.values()}
        if have != want:
            return f"{kind} are {_listed(have)}, the manifest says {_listed(want)}"
    if host := [tensor.name for tensor in found if not tensor.on_device]:
        return f"{', '.join(host)}: read on the host as a shape; an engine of one static shape has no such input"
    return None


def _listed(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in tensors.items()) or "none"
