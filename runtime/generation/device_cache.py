"""Keys and values in memory of a device: a KV cache that engines continue in place, and what encoders made of prompts.

Whoever makes one closes it; parts of it, and what has fewer heads, are gone then too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType

import numpy as np

from ...bundle.entries.generation_entry import PAST, CachedLayer, GenerationEntry
from ..device.device import (
    ALIGNMENT,
    TOKENS,
    TOKENS_OF_KEYS,
    Device,
    DeviceArray,
    copy_tokens,
    empty_tensors,
    free_tensors,
    swap_rows,
)
from ..engines.runner import CacheRunner, Runner
from ..inputs.arrays import Array
from .cache import AnyCache, AnySource, BoundCall, SlidingWindow, Source, source_shapes

_ITEM_BYTES = 4


@dataclass(frozen=True)
class DeviceSource(AnySource[DeviceArray]):
    """A source in memory of a device."""

    device: Device = field(kw_only=True)

    @staticmethod
    def empty(entry: GenerationEntry, rows: int, tokens: int, device: Device) -> DeviceSource:
        """For prompts of up to so many ``tokens``. Raises BundleIncompatibleError where the device has no memory for
        it."""
        tensors = empty_tensors(source_shapes(entry, rows, tokens), device)
        return DeviceSource(tensors, np.ones(rows, np.int64), device=device)

    @staticmethod
    def copied(source: Source, device: Device) -> DeviceSource:
        """The numbers of ``source``, copied over. Raises as ``empty``."""
        tensors = empty_tensors((tensor.shape for tensor in source.tensors), device)
        try:
            with device.lock:
                for there, tensor in zip(tensors, source.tensors, strict=True):
                    device.to_device(there.address, tensor)
                device.wait()
        except BaseException:
            free_tensors(tensors, device)
            raise
        return DeviceSource(tensors, source.lengths.copy(), device=device)

    def close(self) -> None:
        """Gives its memory back; no engine may be bound to it afterwards."""
        free_tensors(self.tensors, self.device)

    def swap_rows(self, one: int, other: int) -> None:
        tokens = int(max(self.lengths[[one, other]]))
        swap_rows(self.device, list(zip(self.tensors, self._token_dims, strict=True)), one, other, tokens)
        self.lengths[[one, other]] = self.lengths[[other, one]]

    def read(self, row: int, runner: Runner, entry: GenerationEntry, prompt: Array) -> None:
        """As ``AnySource.read``, into memory of its own for that long, and from there into the row, whose tokens lie
        further apart. Raises BundleIncompatibleError where the device has no memory for it."""
        device, tokens = self.device, len(prompt)
        with device.lock, prompt_read(device, runner, entry, prompt) as found:
            for tensor, array, dim in zip(self.tensors, found, self._token_dims, strict=True):
                copy_tokens(device, tensor.rows(row, row + 1), array, tokens, dim)
        self.lengths[row] = tokens

    @property
    def _token_dims(self) -> tuple[int, ...]:
        return (TOKENS_OF_KEYS, TOKENS) * (len(self.tensors) // 2)


@contextmanager
def prompt_read(
    device: Device,
    runner: Runner,
    entry: GenerationEntry,
    ids: Array,
    outputs: Mapping[str, Array] = MappingProxyType({}),
) -> Iterator[list[DeviceArray]]:
    """An encoder's output, by its open ``runner``, for a prompt, as ``read_source`` has it, on the ``device`` for as
    long as the block lasts; its other ``outputs`` are fetched. Raises as ``DeviceSource.read``."""
    assert isinstance(runner, CacheRunner)
    arrays = [DeviceArray(0, "float32", shape) for shape in source_shapes(entry, 1, len(ids))]
    starts = list(accumulate((-(-array.bytes // ALIGNMENT) * ALIGNMENT for array in arrays), initial=0))
    block = device.allocate(starts[-1])
    try:
        found = [replace(array, address=block + start) for array, start in zip(arrays, starts, strict=False)]
        names = [spec.name for spec in entry.encoder_interface[1]]
        feeds = {"input_ids": np.ascontiguousarray(ids[None])}
        call = runner.bind_cache(feeds, outputs, dict(zip(names, found, strict=True)))
        try:
            call()
        finally:
            call.close()
        yield found
        device.wait()  # where an interruption comes, it is still given back
    finally:
        device.free(block)


@dataclass(frozen=True)
class DeviceCache(AnyCache[DeviceArray]):
    """A cache in memory of a device; every layer has ``capacity`` places, so that no window slides. Whoever made its
    ``source`` closes that."""

    device: Device = field(kw_only=True)

    @staticmethod
    def empty(
        layers: Sequence[CachedLayer], rows: int, capacity: int, device: Device, source: DeviceSource | None = None
    ) -> DeviceCache:
        """Room for ``capacity`` tokens in each of ``rows`` rows. Raises BundleIncompatibleError where the device has no
        memory for it."""
        shapes = ((rows, layer.heads, capacity, layer.size) for layer in layers for _ in ("key", "value"))
        window = SlidingWindow.of(layers, rows)
        return DeviceCache(empty_tensors(shapes, device), capacity, source, window, device=device)

    def close(self) -> None:
        """Gives its memory back; no engine may be bound to it afterwards."""
        free_tensors(self.tensors, self.device)

    def make_room(self, row: int, position: int, tokens: int, drafted: int = 0) -> None:
        """Does nothing: there is room for every token of the text."""

    def copy_row(self, source: int, target: int, tokens: int) -> None:
        with self.device.lock:
            for tensor in self.tensors:
                copy_tokens(self.device, tensor.rows(target, target + 1), tensor.rows(source, source + 1), tokens)

    def swap_rows(self, one: int, other: int, tokens: int) -> None:
        swap_rows(self.device, [(tensor, TOKENS) for tensor in self.tensors], one, other, tokens)
        if self.source is not None:
            self.source.swap_rows(one, other)

    def copy_tokens(self, other: DeviceCache, tokens: int) -> None:
        """Makes the first ``tokens`` of every row those of ``other``, which has as many rows and heads."""
        with self.device.lock:
            for target, tensor in zip(self.tensors, other.tensors, strict=True):
                copy_tokens(self.device, target, tensor, tokens)

    def bind(self, runner: Runner, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> BoundCall:
        assert isinstance(runner, CacheRunner)
        counts, read = ({}, {}) if self.source is None else (self.source.counts, self.source.named())
        call = runner.bind_cache({**feeds, **counts}, outputs, {**read, **self.named(PAST)})
        return BoundCall(call, call.close)

    def read(self, number: int, row: int, start: int, stop: int) -> Array:
        tensor, device = self.tensors[number].rows(row, row + 1), self.device
        _, heads, places, size = tensor.shape
        found = np.empty((1, heads, stop - start, size), np.float32)
        with device.lock:
            for head in range(heads):
                device.to_host(found[0, head], tensor.address + (head * places + start) * size * _ITEM_BYTES)
            device.wait()
        return found
