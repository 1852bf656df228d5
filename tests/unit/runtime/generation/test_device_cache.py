"""A cache on a device, which the processor plays, against the same one on the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from nestforge.bundle.entries.generation_entry import CachedLayer
from nestforge.runtime.device.device import HostDevice
from nestforge.runtime.generation.any_cache import AnyCache
from nestforge.runtime.generation.cache import Cache
from nestforge.runtime.generation.device_cache import DeviceCache

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


def everything(cache: AnyCache[object]) -> list[np.ndarray]:  # type: ignore[type-var]
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
    assert there.window is not None
    assert there.window.starts.tolist() == [0, 0, 0]
    assert there.usable(0, 5) == 5


def test_memory_that_is_short_is_given_back(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([device.allocate(320), device.allocate(320)])
    monkeypatch.setattr(device, "allocate", lambda _size: next(given))
    with pytest.raises(StopIteration):
        DeviceCache.empty((CachedLayer(2, 8), CachedLayer(2, 8)), 1, 5, device)
