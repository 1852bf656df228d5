"""Where the cache of a session lies: in memory of the host's, or of a device's, which has room in steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...bundle.entries.generation_entry import GenerationEntry
from ...errors import InputError
from ..device.device import Device
from .any_cache import AnyCache
from .cache import Cache
from .device_cache import DeviceCache
from .sources.device_source import DeviceSource
from .sources.source import Source


class CacheMemory(Protocol):
    """Of the rows of one session."""

    def empty(self) -> AnyCache[Any]:
        """A cache of all rows, as large as it must be at first. Raises MemoryError, or BundleIncompatibleError where a
        device has too little memory."""
        ...

    def grown(self, laid_out: AnyCache[Any], tokens: int, kept: int) -> AnyCache[Any]:
        """A cache with room for ``tokens``. Laid out as the one there was, which is ``laid_out`` for smaller heads
        perhaps, it has the first ``kept`` tokens of every row. That one stays until ``keep``. Raises as ``empty``."""
        ...

    def keep(self, cache: AnyCache[Any]) -> None:
        """Gives back all but ``cache``; no engine is bound to another one. An interruption leaves the rest to the next
        call, or to ``close``."""
        ...

    def close(self) -> None:
        """Gives all of it back."""
        ...


class HostMemory:
    """Room for all tokens at once: the system gives pages as they are written."""

    def __init__(self, entry: GenerationEntry, rows: int, capacity: int, prompt_tokens: int) -> None:
        """Behind an encoder there is room for prompts of ``prompt_tokens``."""
        self._entry, self._rows, self._capacity, self._prompt_tokens = entry, rows, capacity, prompt_tokens

    def empty(self) -> Cache:
        """See ``CacheMemory.empty``."""
        entry, rows = self._entry, self._rows
        source = Source.empty(entry, rows, self._prompt_tokens) if self._prompt_tokens else None
        return Cache.empty(entry.layers, rows, self._capacity, source, entry.longest_run)

    def grown(self, laid_out: AnyCache[Any], tokens: int, kept: int) -> AnyCache[Any]:  # noqa: ARG002
        """See ``CacheMemory.grown``. Raises InputError: there is room for all tokens from the start."""
        raise _no_room(tokens, self._capacity)

    def keep(self, cache: AnyCache[Any]) -> None:
        """See ``CacheMemory.keep``: there is no other one."""

    def close(self) -> None:
        """See ``CacheMemory.close``: the garbage collector does it."""


class DeviceMemory:
    """Room for as many tokens as engines of one capacity take: the smallest at first, and a larger one only when a row
    needs it, since every step reads all of it. What an encoder made of prompts stays where it is."""

    def __init__(
        self, entry: GenerationEntry, rows: int, capacity: int, prompt_tokens: int, take: Callable[[], Device]
    ) -> None:
        """``take`` opens the device; ``capacity`` is the most that a row may ever have. Behind an encoder there is room
        for prompts of ``prompt_tokens``."""
        self._entry, self._rows, self._prompt_tokens = entry, rows, prompt_tokens
        self._capacities = entry.capacities_for(capacity)
        self._device: Device | None = take()
        self._source: DeviceSource | None = None
        self._open: list[DeviceCache] = []

    def empty(self) -> DeviceCache:
        """See ``CacheMemory.empty``."""
        if self._prompt_tokens:
            assert self._device is not None
            self._source = DeviceSource.empty(self._entry, self._rows, self._prompt_tokens, self._device)
        return self._of(1)

    def grown(self, laid_out: AnyCache[Any], tokens: int, kept: int) -> AnyCache[Any]:
        """See ``CacheMemory.grown``. Raises InputError beyond the largest."""
        assert isinstance(laid_out, DeviceCache)
        if tokens > self._capacities[-1]:
            raise _no_room(tokens, self._capacities[-1])
        larger = self._of(tokens)
        try:
            larger.laid_out(laid_out.heads, laid_out.sizes).copy_tokens(laid_out, kept)
        except BaseException:
            self._close(larger)
            raise
        return larger

    def keep(self, cache: AnyCache[Any]) -> None:
        """See ``CacheMemory.keep``."""
        for other in [one for one in self._open if one is not cache]:
            self._close(other)

    def close(self) -> None:
        """See ``CacheMemory.close``."""
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
