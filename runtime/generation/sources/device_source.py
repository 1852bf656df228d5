"""Keys and values that an encoder made of prompts, in memory of a device, where a decoder reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType

import numpy as np

from ....bundle.entries.generation_entry import GenerationEntry
from ...device.device import (
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
from ...engines.runner import CacheRunner, Runner
from ...inputs.arrays import Array
from .any_source import AnySource, source_shapes
from .source import Source


@dataclass(frozen=True)
class DeviceSource(AnySource[DeviceArray]):
    """See ``AnySource``. Who made it closes it; parts of it, and what has fewer heads, are gone then too."""

    device: Device = field(kw_only=True)

    @staticmethod
    def empty(entry: GenerationEntry, rows: int, room: int, device: Device) -> DeviceSource:
        """For prompts of up to ``room`` tokens. Raises BundleIncompatibleError where the device has no memory for
        it."""
        tensors = empty_tensors(source_shapes(entry, rows, room), device)
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

    def part(self, start: int, stop: int) -> DeviceSource:
        """See ``AnySource.part``."""
        tensors = tuple(tensor.rows(start, stop) for tensor in self.tensors)
        return replace(self, tensors=tensors, lengths=self.lengths[start:stop])

    def laid_out(self, heads: Sequence[int], sizes: Sequence[int]) -> DeviceSource:
        """See ``AnySource.laid_out``."""
        found = []
        for place, (kept, size) in enumerate(zip(heads, sizes, strict=True)):
            keys, values = self.tensors[2 * place : 2 * place + 2]
            found += [
                replace(keys, shape=(keys.shape[0], kept, size, keys.shape[3])),
                replace(values, shape=(values.shape[0], kept, values.shape[2], size)),
            ]
        return replace(self, tensors=tuple(found))

    def swap_rows(self, one: int, other: int) -> None:
        """See ``AnySource.swap_rows``."""
        tokens = int(max(self.lengths[[one, other]]))
        swap_rows(self.device, list(zip(self.tensors, self._token_dims, strict=True)), one, other, tokens)
        self.lengths[[one, other]] = self.lengths[[other, one]]

    def read(self, row: int, runner: Runner, entry: GenerationEntry, ids: Array) -> None:
        """See ``AnySource.read``: into memory of its own for that long, and from there into the row, whose tokens lie
        further apart. Raises BundleIncompatibleError where the device has no memory for it."""
        device, tokens = self.device, len(ids)
        with device.lock, prompt_read(device, runner, entry, ids) as found:
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
    """What the open ``runner`` of an encoder makes of a prompt, as ``read_source`` has it, on the ``device`` for as
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
