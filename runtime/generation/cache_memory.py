"""Keys and values in memory of a device: a KV cache that engines continue in place, and what encoders made of prompts.
And the memory of a session's KV cache: on the host, where it has room for all tokens, or on a device, where it grows in
steps.

Whoever makes a cache on a device closes it; parts of it, and what has fewer heads, are gone then too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np

from ...bundle.entries.generation_entry import PAST, CachedLayer, GenerationEntry
from ...errors import InputError
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
from ..engines.onnxruntime_gpu.provider import Provider
from ..engines.runner import CacheRunner, Runner, device_source
from ..inputs.arrays import Array
from .cache import AnyCache, AnySource, BoundCall, Cache, SlidingWindow, Source, source_shapes

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


def session_bytes(entry: GenerationEntry, rows: int, capacity: int, prompt_tokens: int = 0) -> int:
    """Bytes of a session, with the logits of steps. Raises InputError for what its engines do not take."""
    most = max(engine.bucket.batch for engine in entry.engines)
    if rows > most:
        raise InputError(f"rows: expected at most {most}, which the engines take at once, got {rows}")
    require_positions(entry, capacity)
    cache = entry.cache_bytes(rows, capacity) + entry.source_bytes(rows, prompt_tokens)
    return cache + 4 * entry.vocabulary * rows * len(entry.generators)  # each that is bound has logits of its own


def require_positions(entry: GenerationEntry, capacity: int) -> None:
    """Raises InputError for a capacity beyond the positions of the model, or the largest cache of its engines."""
    if capacity > entry.most_tokens:
        raise InputError(f"capacity: expected at most {entry.most_tokens}, the {limited_by(entry)}, got {capacity}")


def limited_by(entry: GenerationEntry) -> str:
    """Settings that the longest text follows from."""
    return "positions of this model" if entry.most_tokens == entry.positions else "tokens of its largest cache"


def memory_for(
    entry: GenerationEntry, rows: int, capacity: int, prompt_tokens: int, provider: Provider | None
) -> CacheMemory:
    """For ``rows`` with room for ``capacity`` tokens each, behind prompts of up to ``prompt_tokens`` that an encoder
    reads, where engines run on ``provider`` or as their back end says. Raises BundleError where there is no device on
    which engines of ``entry`` have a cache."""
    take = device_source(entry.engines[0], provider)
    if take is None:
        return CacheMemory(entry, rows, capacity, prompt_tokens)
    return DeviceMemory(entry, rows, capacity, prompt_tokens, take)


class CacheMemory:
    """Memory of the host's for the rows of one session: room for all tokens at once, since the system gives pages as
    they are written."""

    def __init__(self, entry: GenerationEntry, rows: int, capacity: int, prompt_tokens: int) -> None:
        """``capacity`` is the most tokens that a row may ever have; behind an encoder there is room for prompts of
        ``prompt_tokens``."""
        self._entry, self._rows, self._capacity, self._prompt_tokens = entry, rows, capacity, prompt_tokens

    def empty(self) -> AnyCache[Any]:
        """A cache of all rows, as large as it must be at first. Raises MemoryError, or BundleIncompatibleError where a
        device has too little memory."""
        entry, rows = self._entry, self._rows
        source = Source.empty(entry, rows, self._prompt_tokens) if self._prompt_tokens else None
        return Cache.empty(entry.layers, rows, self._capacity, source, entry.windowed_run, entry.states)

    def grown(self, laid_out: AnyCache[Any], tokens: int, copied: int) -> AnyCache[Any]:  # noqa: ARG002
        """A cache with room for ``tokens``. Laid out as the one there was, which is ``laid_out`` for smaller heads
        perhaps, it has the first ``copied`` tokens of every row. That one stays until ``release_others``. Raises
        InputError beyond the capacity, and as ``empty``."""
        raise _no_room(tokens, self._capacity)

    def release_others(self, cache: AnyCache[Any]) -> None:
        """Releases all but ``cache``; no engine is bound to another one. An interruption leaves the rest to the next
        call, or to ``close``."""

    def close(self) -> None:
        """Gives all of it back; on the host the garbage collector does."""


class DeviceMemory(CacheMemory):
    """Memory of a device: room for as many tokens as engines of one capacity take, the smallest at first, and a larger
    one only when a row needs it, since every step reads all of it. The encoder's answers to prompts stay where they
    are.
    """

    def __init__(
        self, entry: GenerationEntry, rows: int, capacity: int, prompt_tokens: int, take: Callable[[], Device]
    ) -> None:
        """``take`` opens the device."""
        super().__init__(entry, rows, capacity, prompt_tokens)
        self._capacities = entry.capacities_for(capacity)
        self._device: Device | None = take()
        self._source: DeviceSource | None = None
        self._open: list[DeviceCache] = []

    def empty(self) -> DeviceCache:
        if self._prompt_tokens:
            assert self._device is not None
            self._source = DeviceSource.empty(self._entry, self._rows, self._prompt_tokens, self._device)
        return self._of(1)

    def grown(self, laid_out: AnyCache[Any], tokens: int, copied: int) -> AnyCache[Any]:
        assert isinstance(laid_out, DeviceCache)
        if tokens > self._capacities[-1]:
            raise _no_room(tokens, self._capacities[-1])
        larger = self._of(tokens)
        try:
            larger.laid_out(laid_out.heads, laid_out.sizes).copy_tokens(laid_out, copied)
        except BaseException:
            self._close(larger)
            raise
        return larger

    def release_others(self, cache: AnyCache[Any]) -> None:
        for other in [one for one in self._open if one is not cache]:
            self._close(other)

    def close(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            try:
                for cache in tuple(self._open):
                    self._close(cache)
                source, self._source = self._source, None
                if source is not None:
                    source.close()
            finally:
                device.release()

    def _of(self, tokens: int) -> DeviceCache:
        assert self._device is not None
        capacity = next(size for size in self._capacities if size >= tokens)
        self._open.append(DeviceCache.empty(self._entry.layers, self._rows, capacity, self._device, self._source))
        return self._open[-1]

    def _close(self, cache: DeviceCache) -> None:
        with cache.device.lock:
            cache.device.wait()  # where an interruption comes, nothing is gone yet
            self._open = [one for one in self._open if one is not cache]
            cache.close()


def _no_room(tokens: int, capacity: int) -> InputError:
    return InputError(f"session: {tokens} tokens of a row, it has room for {capacity}; open one with more")
