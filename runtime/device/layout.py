"""Where an engine's inputs and outputs lie on a device, and whether arrays fit: pure decisions.

All of them share one block of device memory and one of page-locked host memory, at the same offsets, inputs first: so
one copy brings all inputs over, and each output comes back by itself if it is wanted. Of an engine that takes a range
of shapes each run has a layout of its own, in a block that holds the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.tensor_spec import TensorSpec
from ..inputs.arrays import Array
from ..inputs.feeds import nearest_shape
from .device import ALIGNMENT, DeviceArray


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

    def host_view(self, block: Array) -> Array:
        """This tensor in a block of the host's memory (uint8)."""
        view: Array = block[self.offset : self.offset + self.bytes].view(np.dtype(self.dtype)).reshape(self.shape)
        return view


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
        return self._missing(feeds)

    def device_misfit(self, feeds: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]) -> str | None:
        """The same of arrays on the device."""
        for kind, slots, arrays in (("input", self.inputs, feeds), ("output", self.outputs, outputs)):
            for name, array in arrays.items():
                if name not in slots:
                    return f"has no {kind} {name!r}; it has {', '.join(slots)}"
                slot = slots[name]
                if (array.dtype, array.shape) != (slot.dtype, slot.shape):
                    return f"{name}: expected {slot.dtype} {list(slot.shape)}, got {array.dtype} {list(array.shape)}"
        return self._missing(feeds)

    def _missing(self, feeds: Mapping[str, object]) -> str | None:
        missing = sorted(self.inputs.keys() - feeds.keys())
        return f"no array for input {', '.join(missing)}" if missing else None


class Layouts:
    """The layouts of an engine, one for each shape of ``bucket``; none needs more bytes than ``largest``."""

    def __init__(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], bucket: Bucket) -> None:
        self.bucket = bucket
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self.largest = layout_of(self._inputs, self._outputs, bucket)

    def of(self, feeds: Mapping[str, Array | DeviceArray]) -> Layout:
        """The layout at the sizes of ``feeds``, or the nearest one that the engine takes, which they do not fit."""
        if self.bucket.is_static:
            return self.largest
        return layout_of(self._inputs, self._outputs, nearest_shape(self._inputs, feeds, self.bucket))


def layout_of(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    bucket: Bucket,
    others: Mapping[str, int] = MappingProxyType({}),
) -> Layout:
    """The slots of an engine at ``bucket``, the largest where it is a range, with the sizes of ``others`` by name."""
    position = 0
    slots: list[Slot] = []
    for spec in (*inputs, *outputs):
        shape = spec.shape(bucket, others)
        size = prod(shape) * np.dtype(spec.dtype).itemsize
        slots.append(Slot(spec.name, spec.dtype, shape, position, size))
        position += -(-size // ALIGNMENT) * ALIGNMENT
    first_output = slots[len(inputs)].offset if outputs else position
    named = [(slot.name, slot) for slot in slots]
    return Layout(dict(named[: len(inputs)]), dict(named[len(inputs) :]), first_output, position)
