"""Keys and values in memory of a device, where engines continue them in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..bundle.entries.generation_entry import PAST, CachedLayer, window_of
from ..device.device import Device, DeviceArray
from ..engines.runner import CacheRunner, Runner
from ..inputs.arrays import Array
from .any_cache import AnyCache, BoundCall
from .sliding_window import SlidingWindow

_ITEM_BYTES = 4


@dataclass(frozen=True)
class DeviceCache(AnyCache[DeviceArray]):
    """See ``AnyCache``; every layer has ``capacity`` places, so that no window slides. Who made it closes it; parts of
    it, and what has fewer heads, are gone then too."""

    device: Device = field(kw_only=True)

    @staticmethod
    def empty(layers: Sequence[CachedLayer], rows: int, capacity: int, device: Device) -> DeviceCache:
        """Room for ``capacity`` tokens in each of ``rows`` rows. Raises BundleIncompatibleError where the device has no
        memory for it."""
        seen = window_of(layers)
        window = None if seen is None else SlidingWindow.empty(seen, rows)
        tensors: list[DeviceArray] = []
        try:
            with device.lock:
                for layer in layers:
                    for _ in ("key", "value"):
                        shape = (rows, layer.heads, capacity, layer.size)
                        line, lines = capacity * layer.size * _ITEM_BYTES, rows * layer.heads
                        tensors.append(DeviceArray(device.allocate(lines * line), "float32", shape))
                        # Attention reads every place, and what is masked must be a number.
                        device.clear_rows(tensors[-1].address, line, line, lines)
        except BaseException:
            _free(tensors, device)
            raise
        return DeviceCache(tuple(tensors), capacity, window=window, device=device)

    def close(self) -> None:
        """Gives its memory back; no engine may be bound to it afterwards."""
        _free(self.tensors, self.device)

    def part(self, start: int, stop: int) -> DeviceCache:
        """See ``AnyCache.part``."""
        window = None if self.window is None else self.window.part(start, stop)
        return replace(self, tensors=tuple(tensor.rows(start, stop) for tensor in self.tensors), window=window)

    def laid_out(self, heads: Sequence[int], sizes: Sequence[int]) -> DeviceCache:
        """See ``AnyCache.laid_out``."""
        kept = [each for each in zip(heads, sizes, strict=True) for _ in ("key", "value")]
        tensors = [
            replace(tensor, shape=(tensor.shape[0], count, tensor.shape[2], size))
            for tensor, (count, size) in zip(self.tensors, kept, strict=True)
        ]
        return replace(self, tensors=tuple(tensors))

    def make_room(self, row: int, position: int, tokens: int, drafted: int = 0) -> None:
        """See ``AnyCache.make_room``: there is room for every token of the text."""

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """See ``AnyCache.copy_row``."""
        with self.device.lock:
            for tensor in self.tensors:
                self._copy(tensor.rows(target, target + 1), tensor.rows(source, source + 1), tokens)

    def swap_rows(self, one: int, other: int, tokens: int) -> None:
        """See ``AnyCache.swap_rows``."""
        if not tokens:
            return
        device = self.device
        with device.lock:
            sizes = [tensor.shape[1] * tokens * tensor.shape[3] * _ITEM_BYTES for tensor in self.tensors]
            between = device.allocate(max(sizes))
            try:
                for tensor in self.tensors:
                    first, second = tensor.rows(one, one + 1), tensor.rows(other, other + 1)
                    kept = DeviceArray(between, tensor.dtype, (1, tensor.shape[1], tokens, tensor.shape[3]))
                    self._copy(kept, first, tokens)
                    self._copy(first, second, tokens)
                    self._copy(second, kept, tokens)
            finally:
                device.free(between)

    def copy_tokens(self, source: DeviceCache, tokens: int) -> None:
        """Makes the first ``tokens`` of every row those of ``source``, which has as many rows and heads."""
        with self.device.lock:
            for target, tensor in zip(self.tensors, source.tensors, strict=True):
                self._copy(target, tensor, tokens)

    def bind(self, runner: Runner, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> BoundCall:
        """See ``AnyCache.bind``."""
        assert isinstance(runner, CacheRunner)
        return runner.bind_cache(feeds, outputs, self.named(PAST))

    def read(self, number: int, row: int, start: int, stop: int) -> Array:
        """See ``AnyCache.read``."""
        tensor, device = self.tensors[number].rows(row, row + 1), self.device
        _, heads, places, size = tensor.shape
        found = np.empty((1, heads, stop - start, size), np.float32)
        with device.lock:
            for head in range(heads):
                device.to_host(found[0, head], tensor.address + (head * places + start) * size * _ITEM_BYTES)
            device.wait()
        return found

    def _copy(self, target: DeviceArray, source: DeviceArray, tokens: int) -> None:
        """The first ``tokens`` of arrays ``[rows, heads, places, size]`` that differ in places alone."""
        rows, heads, places, size = source.shape
        pitches = (target.shape[2] * size * _ITEM_BYTES, places * size * _ITEM_BYTES)
        width = tokens * size * _ITEM_BYTES
        if width:
            self.device.copy_rows(target.address, pitches[0], source.address, pitches[1], width, rows * heads)


def _free(tensors: Sequence[DeviceArray], device: Device) -> None:
    with device.lock:
        for tensor in tensors:
            device.free(tensor.address)
