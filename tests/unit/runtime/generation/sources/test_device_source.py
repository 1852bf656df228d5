"""What an encoder made of prompts on a device, which the processor plays, against the same on the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from nestforge.bundle.entries.generation_entry import CachedLayer, EncoderEntry, GenerationEntry
from nestforge.runtime.device.device import DeviceArray, HostDevice
from nestforge.runtime.generation.cache import Cache
from nestforge.runtime.generation.device_cache import DeviceCache
from nestforge.runtime.generation.sources.device_source import DeviceSource
from nestforge.runtime.generation.sources.source import Source

LAYERS = (CachedLayer(2, 8), CachedLayer(3, 16))
ENTRY = GenerationEntry(48, (CachedLayer(2, 8),) * 2, 40, (), (), encoder=EncoderEntry(0, 40, (), LAYERS))
ROWS, ROOM = 3, 5

Sources = tuple[Source, DeviceSource]


@pytest.fixture
def both(device: HostDevice) -> Iterator[Sources]:
    """With the same numbers, behind prompts of 4, 1 and 5 tokens."""
    host, rng = Source.empty(ENTRY, ROWS, ROOM), np.random.default_rng(0)
    for tensor in host.tensors:
        tensor[...] = rng.standard_normal(tensor.shape)
    host.lengths[:] = 4, 1, 5
    there = DeviceSource.copied(host, device)
    yield host, there
    there.close()


def array(device: HostDevice, tensor: DeviceArray) -> np.ndarray:
    found = np.empty(tensor.shape, np.float32)
    device.to_host(found, tensor.address)
    return found


def require_equal(host: Source, there: DeviceSource) -> None:
    """Of every row the tokens that count."""
    assert (there.heads, there.sizes, there.bytes) == (host.heads, host.sizes, host.bytes)
    assert list(there.counts) == list(host.counts) == ["source_lengths"]
    np.testing.assert_array_equal(there.lengths, host.lengths)
    for (name, tensor), (known, expected) in zip(there.named().items(), host.named().items(), strict=True):
        assert (name, tensor.shape) == (known, expected.shape)
        found = array(there.device, tensor)
        for row, length in enumerate(host.lengths):
            counted = np.s_[row, :, :, :length] if "key" in name else np.s_[row, :, :length]
            np.testing.assert_array_equal(found[counted], expected[counted])


def test_an_empty_one_holds_numbers(device: HostDevice) -> None:
    source = DeviceSource.empty(ENTRY, ROWS, ROOM, device)
    assert not any(array(device, tensor).any() for tensor in source.tensors)
    assert source.lengths.tolist() == [1, 1, 1], "attention over nothing is no number"
    require_equal(Source.empty(ENTRY, ROWS, ROOM), source)
    source.close()


@pytest.mark.parametrize("rows", [(0, 1), (1, 2), (2, 0)])
def test_rows_are_exchanged_with_their_lengths(both: Sources, rows: tuple[int, int]) -> None:
    for source in both:
        source.swap_rows(*rows)
    require_equal(*both)


def test_parts_and_fewer_heads_are_the_same_memory(both: Sources) -> None:
    host, there = both
    require_equal(host.part(1, 3), there.part(1, 3))
    require_equal(host.part(2, 3).laid_out([1, 2], [8, 16]), there.part(2, 3).laid_out([1, 2], [8, 16]))
    for source in both:
        source.laid_out([1, 2], [8, 8]).part(1, 3).swap_rows(0, 1)
    require_equal(host.laid_out([1, 2], [8, 8]), there.laid_out([1, 2], [8, 8]))


def test_it_moves_with_the_rows_of_its_cache(both: Sources, device: HostDevice) -> None:
    """Whether or not tokens were written there."""
    host, there = both
    caches = Cache.empty(ENTRY.layers, ROWS, 7, host), DeviceCache.empty(ENTRY.layers, ROWS, 7, device, there)
    for cache in caches:
        cache.swap_rows(0, 2, 0)
        cache.part(1, 3).swap_rows(0, 1, 3)
    require_equal(*both)
    assert caches[1].heads == caches[0].heads == (2, 2, 2, 3)
    assert caches[1].sizes == caches[0].sizes == (8, 8, 8, 16)
    assert caches[1].bytes == caches[0].bytes
    narrow = caches[1].part(0, 1).laid_out([1, 2, 2, 1], [8] * 4)
    assert (narrow.heads, narrow.sizes) == ((1, 2, 2, 1), (8,) * 4)
    caches[1].close()


def test_memory_that_is_short_is_given_back(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Source.empty(ENTRY, ROWS, ROOM)
    given = iter([device.allocate(4000), device.allocate(4000)])
    with monkeypatch.context() as patch:
        patch.setattr(device, "allocate", lambda _size: next(given))
        with pytest.raises(StopIteration):
            DeviceSource.empty(ENTRY, ROWS, ROOM, device)

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "to_device", fails)
    with pytest.raises(KeyboardInterrupt):
        DeviceSource.copied(host, device)
