"""The memory of a cache."""

import numpy as np
import pytest
from nestforge.bundle.entries.generation_entry import CachedLayer, EncoderEntry, GenerationEntry
from nestforge.runtime.generation.cache import Cache, Source

LAYERS = (CachedLayer(2, 8), CachedLayer(1, 16))


def test_a_cache_has_keys_and_values_of_every_layer() -> None:
    cache = Cache.empty(LAYERS, rows=3, capacity=5)
    assert (cache.rows, cache.capacity, cache.bytes) == (3, 5, 4 * 3 * 5 * 2 * (16 + 16))
    shapes = {name: array.shape for name, array in cache.named("past_").items()}
    assert shapes == {
        "past_key_0": (3, 2, 5, 8),
        "past_value_0": (3, 2, 5, 8),
        "past_key_1": (3, 1, 5, 16),
        "past_value_1": (3, 1, 5, 16),
    }


def test_a_part_is_the_same_memory() -> None:
    cache = Cache.empty(LAYERS, rows=3, capacity=5)
    row = cache.part(1, 2)
    assert row.rows == 1
    assert all(tensor.flags.c_contiguous for tensor in row.tensors)
    row.tensors[0][:] = 7
    assert (cache.tensors[0][1] == 7).all()
    assert not cache.tensors[0][[0, 2]].any()


def test_a_row_is_copied_as_far_as_it_is_written() -> None:
    cache = Cache.empty(LAYERS, rows=2, capacity=5)
    for tensor in cache.tensors:
        tensor[1] = np.arange(tensor[1].size).reshape(tensor[1].shape) + 1
    cache.copy_row(1, 0, tokens=3)
    for tensor in cache.tensors:
        np.testing.assert_array_equal(tensor[0, :, :3], tensor[1, :, :3])
        assert not tensor[0, :, 3:].any()


def test_rows_change_places_as_far_as_they_are_written() -> None:
    cache = Cache.empty(LAYERS, rows=3, capacity=5)
    for tensor in cache.tensors:
        tensor[:] = np.arange(tensor.size).reshape(tensor.shape)
    before = [tensor.copy() for tensor in cache.tensors]
    cache.swap_rows(0, 2, tokens=3)
    for tensor, old in zip(cache.tensors, before, strict=True):
        np.testing.assert_array_equal(tensor[[0, 2], :, :3], old[[2, 0], :, :3])
        np.testing.assert_array_equal(tensor[:, :, 3:], old[:, :, 3:])
        np.testing.assert_array_equal(tensor[1], old[1])


@pytest.mark.parametrize(("rows", "heads", "sizes"), [(1, (1, 1), (8, 16)), (3, (1, 1), (8, 16)), (1, (2, 1), (4, 16))])
def test_fewer_or_narrower_heads_lie_close_behind_each_other_on_the_same_memory(
    rows: int, heads: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    cache = Cache.empty(LAYERS, rows, capacity=5)
    for tensor in cache.tensors:
        tensor[:] = np.arange(tensor.size).reshape(tensor.shape)
    fewer = cache.laid_out(heads, sizes)
    assert (fewer.heads, fewer.sizes, cache.heads, cache.sizes) == (heads, sizes, (2, 1), (8, 16))
    for number, (tensor, whole) in enumerate(zip(fewer.tensors, cache.tensors, strict=True)):
        assert tensor.shape == (rows, heads[number // 2], 5, sizes[number // 2])
        assert np.shares_memory(tensor, whole)
        np.testing.assert_array_equal(tensor.ravel(), whole.ravel()[: tensor.size])


ENTRY = GenerationEntry(48, (CachedLayer(2, 8), CachedLayer(1, 16)), 40, (), (), encoder=EncoderEntry(0, 40, ()))


def read_of(tokens: int, start: float) -> list[np.ndarray]:
    shapes = [(1, 2, 8, tokens), (1, 2, tokens, 8), (1, 1, 16, tokens), (1, 1, tokens, 16)]
    return [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + start for shape in shapes]


def test_names_and_shapes_are_those_of_engines() -> None:
    source = Source.empty(ENTRY, rows=3, tokens=5)
    shapes = {name: array.shape for name, array in {**source.counts, **source.named()}.items()}
    inputs, _ = ENTRY.interface
    sizes = {"batch": 3, "source": 5}
    expected = {
        spec.name: tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.dims)
        for spec in inputs
        if spec.name.startswith("source")
    }
    assert shapes == expected
    assert [spec.name for spec in ENTRY.encoder_interface[1]] == list(shapes)[1:]
    cache = Cache.empty(ENTRY.layers, 3, 7, source)
    assert list(cache.inputs) == [spec.name for spec in inputs][3:]
    assert cache.bytes == 4 * 3 * 2 * 32 * (7 + 5) == Cache.empty(ENTRY.layers, 3, 7).bytes + source.bytes


def test_a_row_is_written_as_far_as_its_prompt_goes_and_moves_with_its_cache() -> None:
    source = Source.empty(ENTRY, rows=2, tokens=5)
    short, long = read_of(2, 1), read_of(5, 100)
    source.put(0, short)
    source.put(1, long)
    assert source.lengths.tolist() == [2, 5]
    np.testing.assert_array_equal(source.tensors[0][0, :, :, :2], short[0][0])
    np.testing.assert_array_equal(source.tensors[1][0, :, :2], short[1][0])
    assert not source.tensors[0][0, :, :, 2:].any()
    assert not source.tensors[1][0, :, 2:].any()
    Cache.empty(ENTRY.layers, 2, 7, source).swap_rows(0, 1, tokens=3)
    assert source.lengths.tolist() == [5, 2]
    np.testing.assert_array_equal(source.tensors[0][0], long[0][0])
    np.testing.assert_array_equal(source.tensors[3][1, :, :2], short[3][0])


def test_a_part_of_a_source_is_the_same_memory() -> None:
    source = Source.empty(ENTRY, rows=3, tokens=5)
    part = Cache.empty(ENTRY.layers, 3, 7, source).part(1, 2).source
    part.put(0, read_of(3, 1))
    assert source.lengths.tolist() == [1, 3, 1]
    assert source.tensors[0][1].any()
    assert not source.tensors[0][[0, 2]].any()
