"""Memory of a session's KV cache: on the host, where it has room for all tokens, or on a device, where it grows in
steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...bundle.entries.generation_entry import GenerationEntry
from ...errors import InputError
from ..device.device import Device
from ..engines.onnxruntime_gpu.provider import Provider
from ..engines.runner import device_source
from .cache import AnyCache, Cache, Source
from .device_cache import DeviceCache, DeviceSource


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
