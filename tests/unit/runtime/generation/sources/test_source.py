"""The memory of what an encoder made of prompts."""

from __future__ import annotations

import numpy as np
from nestforge.bundle.entries.generation_entry import CachedLayer, EncoderEntry, GenerationEntry
from nestforge.runtime.generation.cache import Cache
from nestforge.runtime.generation.sources.source import Source

ENTRY = GenerationEntry(48, (CachedLayer(2, 8), CachedLayer(1, 16)), 40, (), (), encoder=EncoderEntry(0, 40, ()))


def found(tokens: int, start: float) -> list[np.ndarray]:
    shapes = [(1, 2, 8, tokens), (1, 2, tokens, 8), (1, 1, 16, tokens), (1, 1, tokens, 16)]
    return [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + start for shape in shapes]


def test_names_and_shapes_are_those_of_engines() -> None:
    source = Source.empty(ENTRY, rows=3, room=5)
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
    source = Source.empty(ENTRY, rows=2, room=5)
    short, long = found(2, 1), found(5, 100)
    source.write(0, short)
    source.write(1, long)
    assert source.lengths.tolist() == [2, 5]
    np.testing.assert_array_equal(source.tensors[0][0, :, :, :2], short[0][0])
    np.testing.assert_array_equal(source.tensors[1][0, :, :2], short[1][0])
    assert not source.tensors[0][0, :, :, 2:].any()
    assert not source.tensors[1][0, :, 2:].any()
    Cache.empty(ENTRY.layers, 2, 7, source).swap_rows(0, 1, tokens=3)
    assert source.lengths.tolist() == [5, 2]
    np.testing.assert_array_equal(source.tensors[0][0], long[0][0])
    np.testing.assert_array_equal(source.tensors[3][1, :, :2], short[3][0])


def test_a_part_is_the_same_memory() -> None:
    source = Source.empty(ENTRY, rows=3, room=5)
    part = Cache.empty(ENTRY.layers, 3, 7, source).part(1, 2).source
    assert part is not None
    part.write(0, found(3, 1))
    assert source.lengths.tolist() == [1, 3, 1]
    assert source.tensors[0][1].any()
    assert not source.tensors[0][[0, 2]].any()
