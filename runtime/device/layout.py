"""Where an engine's inputs and outputs lie on a device, whether arrays fit, and runs that copy through such memory.

All of them share one block of device memory and one of page-locked host memory, at the same offsets, inputs first: so
one copy brings all inputs over, and each output comes back by itself if it is wanted. Each run of an engine that takes
a range of shapes has a layout of its own, in a block that holds the largest.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ...bundle.open_bundle import Bundle
from ...errors import BundleError, InputError
from ..inputs.arrays import Array, nearest_shape
from .device import ALIGNMENT, DeviceArray

# By name, all on the host or all on the device.
Arrays = Mapping[str, Array] | Mapping[str, DeviceArray]


@dataclass(frozen=True)
class Slot:
    """One tensor of an engine: ``bytes`` from ``offset`` in both blocks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int

    def misfit(self, array: Array | DeviceArray) -> str | None:
        """Why ``array`` is none of this tensor as it lies in memory, or None."""
        strides = "" if isinstance(array, DeviceArray) or array.flags.c_contiguous else " with strides"
        if str(array.dtype) == self.dtype and array.shape == self.shape and not strides:
            return None
        return (
            f"{self.name}: expected contiguous {self.dtype} {list(self.shape)}, "
            f"got {array.dtype} {list(array.shape)}{strides}"
        )

    def host_view(self, block: Array) -> Array:
        """This tensor in a block of the host's memory (uint8)."""
        return block[self.offset : self.offset + self.bytes].view(np.dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class Layout:
    """Slots by name; the first ``input_bytes`` of the ``bytes`` of a block are the inputs'."""

    inputs: Mapping[str, Slot]
    outputs: Mapping[str, Slot]
    input_bytes: int
    bytes: int

    def misfit(self, feeds: Arrays, outputs: Arrays) -> str | None:
        """Why a run from ``feeds`` into ``outputs`` is impossible, or None; an output may be left out."""
        for kind, slots, arrays in (("input", self.inputs, feeds), ("output", self.outputs, outputs)):
            for name, array in arrays.items():
                if name not in slots:
                    return f"has no {kind} {name!r}; it has {', '.join(slots)}"
                if problem := slots[name].misfit(array):
                    return problem
        missing = sorted(self.inputs.keys() - feeds.keys())
        return f"no array for input {', '.join(missing)}" if missing else None

    def fill(self, block: Array, feeds: Mapping[str, Array]) -> None:
        """Puts ``feeds`` into the inputs' slots of a block of the host's."""
        for name, slot in self.inputs.items():
            slot.host_view(block)[...] = feeds[name]

    def read(self, block: Array, outputs: Mapping[str, Array]) -> None:
        """Copies the slots of ``outputs`` out of a block of the host's."""
        for name, array in outputs.items():
            array[...] = self.outputs[name].host_view(block)


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


def routes_of(engine: EngineEntry) -> tuple[TensorSpec, ...]:
    """The outputs of an engine that are its routes."""
    return tuple(TensorSpec(entry.name, "int64", entry.shape) for entry in engine.routing or ())


class CopyingRunner(ABC):
    """One engine whose values are copied into arrays of the caller; see ``DeviceRunner`` for those on a GPU."""

    # The engine that runs as long as it is the same object, None while inactive; calls that are bound keep it.
    _opened: object | None

    def __init__(self, bundle: Bundle, engine: EngineEntry) -> None:
        self.engine = engine
        self._bundle = bundle
        self._where = f"engine {engine.id}"
        self._inputs, outputs = bundle.manifest.interface_of(engine)
        routing = routes_of(engine)
        self._returned = (*outputs, *routing)
        self._layouts = Layouts(self._inputs, self._returned, engine.bucket)
        self._outputs = [spec.name for spec in outputs]
        self._all = [*self._outputs, *(spec.name for spec in routing)]
        self._opened = None

    @abstractmethod
    def _run(self, layout: Layout, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Runs from ``feeds`` into ``outputs``, which fit ``layout``. Raises as ``run`` does."""

    def run(self, feeds: Mapping[str, Array], routing: bool = False) -> list[Array]:
        """See ``Runner.run``. Arrays with strides are copied first.

        Raises InputError for arrays that do not fit or values that the processor refuses, BundleError while inactive or
        where the GPU fails.
        """
        feeds = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        layout = self._layouts.of(feeds)
        names = self._all if routing else self._outputs
        outputs = {name: np.empty(layout.outputs[name].shape, layout.outputs[name].dtype) for name in names}
        self._check(layout.misfit(feeds, outputs))
        self._run(layout, feeds, outputs)
        return list(outputs.values())

    def bind(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """See ``Runner.bind``. On a GPU values still go through page-locked memory of the runner's own."""
        layout = self._layouts.of(feeds)
        self._check(layout.misfit(feeds, outputs))
        opened = self._opened
        if opened is None:
            raise self._not_open()

        def call() -> None:
            if self._opened is not opened:
                raise self._not_open()
            self._run(layout, feeds, outputs)

        return call

    def _check(self, problem: str | None) -> None:
        if problem:
            raise InputError(f"{self._where}: {problem}")

    def _not_open(self) -> BundleError:
        return BundleError(f"{self._where}: not open; run it inside its `with` block")
