"""Keys and values in memory of a device, where engines continue them in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...bundle.entries.generation_entry import PAST, CachedLayer, window_of
from ..device.device import TOKENS, Device, DeviceArray, copy_tokens, empty_tensors, free_tensors, swap_rows
from ..engines.runner import CacheRunner, Runner
from ..inputs.arrays import Array
from .any_cache import AnyCache, BoundCall
from .sliding_window import SlidingWindow
from .sources.device_source import DeviceSource

_ITEM_BYTES = 4


@dataclass(frozen=True)
class DeviceCache(AnyCache[DeviceArray]):
    """See ``AnyCache``; every layer has ``capacity`` places, so that no window slides. Who made it closes it; parts of
    it, and what has fewer heads, are gone then too. Its ``source`` is closed by who made that."""

    device: Device = field(kw_only=True)

    @staticmethod
    def empty(
        layers: Sequence[CachedLayer], rows: int, capacity: int, device: Device, source: DeviceSource | None = None
    ) -> DeviceCache:
        """Room for ``capacity`` tokens in each of ``rows`` rows. Raises BundleIncompatibleError where the device has no
        memory for it."""
        seen = window_of(layers)
        window = None if seen is None else SlidingWindow.empty(seen, rows)
        shapes = ((rows, layer.heads, capacity, layer.size) for layer in layers for _ in ("key", "value"))
        return DeviceCache(empty_tensors(shapes, device), capacity, source, window, device=device)

    def close(self) -> None:
        """Gives its memory back; no engine may be bound to it afterwards."""
        free_tensors(self.tensors, self.device)

    def part(self, start: int, stop: int) -> DeviceCache:
        """See ``AnyCache.part``."""
        source = None if self.source is None else self.source.part(start, stop)
        window = None if self.window is None else self.window.part(start, stop)
        tensors = tuple(tensor.rows(start, stop) for tensor in self.tensors)
        return replace(self, tensors=tensors, source=source, window=window)

    def laid_out(self, heads: Sequence[int], sizes: Sequence[int]) -> DeviceCache:
        """See ``AnyCache.laid_out``."""
        layers = len(self.tensors) // 2
        own = [kept for kept in zip(heads[:layers], sizes[:layers], strict=True) for _ in ("key", "value")]
        tensors = [
            replace(tensor, shape=(tensor.shape[0], count, tensor.shape[2], size))
            for tensor, (count, size) in zip(self.tensors, own, strict=True)
        ]
        source = None if self.source is None else self.source.laid_out(heads[layers:], sizes[layers:])
        return replace(self, tensors=tuple(tensors), source=source)

    def make_room(self, row: int, position: int, tokens: int, drafted: int = 0) -> None:
        """See ``AnyCache.make_room``: there is room for every token of the text."""

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """See ``AnyCache.copy_row``."""
        with self.device.lock:
            for tensor in self.tensors:
                copy_tokens(self.device, tensor.rows(target, target + 1), tensor.rows(source, source + 1), tokens)

    def swap_rows(self, one: int, other: int, tokens: int) -> None:
        """See ``AnyCache.swap_rows``."""
        swap_rows(self.device, [(tensor, TOKENS) for tensor in self.tensors], one, other, tokens)
        if self.source is not None:
            self.source.swap_rows(one, other)

    def copy_tokens(self, other: DeviceCache, tokens: int) -> None:
        """Makes the first ``tokens`` of every row those of ``other``, which has as many rows and heads."""
        with self.device.lock:
            for target, tensor in zip(self.tensors, other.tensors, strict=True):
                copy_tokens(self.device, target, tensor, tokens)

    def bind(self, runner: Runner, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> BoundCall:
        """See ``AnyCache.bind``."""
        assert isinstance(runner, CacheRunner)
        counts, read = ({}, {}) if self.source is None else (self.source.counts, self.source.named())
        return runner.bind_cache({**feeds, **counts}, outputs, {**read, **self.named(PAST)})

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
