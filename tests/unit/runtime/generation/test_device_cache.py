"""Caches and sources on a device, which the processor plays, against the same ones on the host."""

from collections.abc import Iterator

import numpy as np
import pytest
from nestforge.bundle.entries.generation_entry import CachedLayer, EncoderEntry, GenerationEntry
from nestforge.runtime.device.device import DeviceArray
from nestforge.runtime.generation.cache import AnyCache, Cache, Source
from nestforge.runtime.generation.cache_memory import DeviceCache, DeviceSource
from support.fake_gpu import HostDevice

LAYERS = (CachedLayer(2, 8), CachedLayer(1, 16, window=3))
SIZES = (8, 16)
ROWS, PLACES = 3, 5

Caches = tuple[Cache, DeviceCache]


@pytest.fixture
def both(device: HostDevice) -> Iterator[Caches]:
    """With the same numbers."""
    host, there = Cache.empty(LAYERS, ROWS, PLACES), DeviceCache.empty(LAYERS, ROWS, PLACES, device)
    rng = np.random.default_rng(0)
    for tensor, array in zip(host.tensors, there.tensors, strict=True):
        tensor[...] = rng.standard_normal(tensor.shape)
        device.to_device(array.address, tensor)
    yield host, there
    there.close()


def everything(cache: AnyCache[object]) -> list[np.ndarray]:
    return [cache.read(number, row, 0, PLACES) for number in range(len(cache.tensors)) for row in range(cache.rows)]


def require_equal(host: Cache, there: DeviceCache) -> None:
    assert (there.rows, there.heads, there.bytes, there.longest_run) == (
        *(host.rows, host.heads, host.bytes, host.longest_run),
    )
    for mine, known in zip(everything(there), everything(host), strict=True):
        np.testing.assert_array_equal(mine, known)


def test_an_empty_one_holds_numbers(device: HostDevice) -> None:
    cache = DeviceCache.empty(LAYERS, ROWS, PLACES, device)
    require_equal(Cache.empty(LAYERS, ROWS, PLACES), cache)
    cache.close()


def test_what_is_read_are_some_places_of_a_row(both: Caches) -> None:
    for cache in both:
        np.testing.assert_array_equal(cache.read(1, 2, 1, 4), both[0].tensors[1][2:3, :, 1:4])


@pytest.mark.parametrize("tokens", [0, 1, 4, PLACES])
def test_rows_are_copied_and_exchanged(both: Caches, tokens: int) -> None:
    host, there = both
    for cache in both:
        cache.copy_row(2, 0, tokens)
    require_equal(host, there)
    for cache in both:
        cache.swap_rows(1, 2, tokens)
    require_equal(host, there)


def test_parts_and_fewer_heads_are_the_same_memory(both: Caches) -> None:
    host, there = both
    require_equal(host.part(1, 3), there.part(1, 3))
    require_equal(host.part(1, 2).laid_out([1, 1], SIZES), there.part(1, 2).laid_out([1, 1], SIZES))
    require_equal(host.laid_out([1, 1], SIZES), there.laid_out([1, 1], SIZES))
    narrow = [cache.laid_out([1, 1], SIZES) for cache in both]
    for cache in narrow:
        cache.swap_rows(0, 2, 4)
    require_equal(*both)


def test_tokens_move_to_a_larger_one(both: Caches, device: HostDevice) -> None:
    host, there = both
    larger = DeviceCache.empty(LAYERS, ROWS, 9, device)
    larger.laid_out([1, 1], SIZES).copy_tokens(there.laid_out([1, 1], SIZES), 4)
    for number, tensor in enumerate(host.laid_out([1, 1], SIZES).tensors):
        for row in range(ROWS):
            moved = larger.laid_out([1, 1], SIZES).read(number, row, 0, 9)
            np.testing.assert_array_equal(moved[:, :, :4], tensor[row : row + 1, :, :4])
            assert not moved[:, :, 4:].any()
    larger.close()


def test_no_window_slides(both: Caches) -> None:
    _, there = both
    there.make_room(0, 4, 1)
    assert there.window.starts.tolist() == [0, 0, 0]
    assert there.usable(0, 5) == 5


def test_memory_that_is_short_is_given_back(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([device.allocate(320), device.allocate(320)])
    monkeypatch.setattr(device, "allocate", lambda _size: next(given))
    with pytest.raises(StopIteration):
        DeviceCache.empty((CachedLayer(2, 8), CachedLayer(2, 8)), 1, 5, device)


READ_LAYERS = (CachedLayer(2, 8), CachedLayer(3, 16))
ENTRY = GenerationEntry(48, (CachedLayer(2, 8),) * 2, 40, (), (), encoder=EncoderEntry(0, 40, (), READ_LAYERS))
ROOM = 5

Sources = tuple[Source, DeviceSource]


@pytest.fixture
def sources(device: HostDevice) -> Iterator[Sources]:
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


def require_equal_sources(host: Source, there: DeviceSource) -> None:
    """The valid tokens of every row."""
    assert (there.heads, there.sizes, there.bytes) == (host.heads, host.sizes, host.bytes)
    assert list(there.counts) == list(host.counts) == ["source_lengths"]
    np.testing.assert_array_equal(there.lengths, host.lengths)
    for (name, tensor), (known, expected) in zip(there.named().items(), host.named().items(), strict=True):
        assert (name, tensor.shape) == (known, expected.shape)
        found = array(there.device, tensor)
        for row, length in enumerate(host.lengths):
            counted = np.s_[row, :, :, :length] if "key" in name else np.s_[row, :, :length]
            np.testing.assert_array_equal(found[counted], expected[counted])


def test_an_empty_source_holds_numbers(device: HostDevice) -> None:
    source = DeviceSource.empty(ENTRY, ROWS, ROOM, device)
    assert not any(array(device, tensor).any() for tensor in source.tensors)
    assert source.lengths.tolist() == [1, 1, 1], "attention over nothing is no number"
    require_equal_sources(Source.empty(ENTRY, ROWS, ROOM), source)
    source.close()


@pytest.mark.parametrize("rows", [(0, 1), (1, 2), (2, 0)])
def test_rows_are_exchanged_with_their_lengths(sources: Sources, rows: tuple[int, int]) -> None:
    for source in sources:
        source.swap_rows(*rows)
    require_equal_sources(*sources)


def test_parts_of_a_source_are_the_same_memory(sources: Sources) -> None:
    host, there = sources
    require_equal_sources(host.part(1, 3), there.part(1, 3))
    require_equal_sources(host.part(2, 3).laid_out([1, 2], [8, 16]), there.part(2, 3).laid_out([1, 2], [8, 16]))
    for source in sources:
        source.laid_out([1, 2], [8, 8]).part(1, 3).swap_rows(0, 1)
    require_equal_sources(host.laid_out([1, 2], [8, 8]), there.laid_out([1, 2], [8, 8]))


def test_it_moves_with_the_rows_of_its_cache(sources: Sources, device: HostDevice) -> None:
    """Whether or not tokens were written there."""
    host, there = sources
    caches = Cache.empty(ENTRY.layers, ROWS, 7, host), DeviceCache.empty(ENTRY.layers, ROWS, 7, device, there)
    for cache in caches:
        cache.swap_rows(0, 2, 0)
        cache.part(1, 3).swap_rows(0, 1, 3)
    require_equal_sources(*sources)
    assert caches[1].heads == caches[0].heads == (2, 2, 2, 3)
    assert caches[1].sizes == caches[0].sizes == (8, 8, 8, 16)
    assert caches[1].bytes == caches[0].bytes
    narrow = caches[1].part(0, 1).laid_out([1, 2, 2, 1], [8] * 4)
    assert (narrow.heads, narrow.sizes) == ((1, 2, 2, 1), (8,) * 4)
    caches[1].close()


def test_memory_that_is_short_for_a_source_is_given_back(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
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
