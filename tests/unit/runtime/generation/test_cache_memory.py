"""What a session takes, and where its cache lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import Decode, EngineEntry
from nestforge.bundle.entries.generation_entry import CachedLayer, EncoderEntry, GenerationEntry
from nestforge.errors import InputError
from nestforge.runtime.device.device import HostDevice
from nestforge.runtime.generation.cache_memory import CacheMemory, DeviceMemory, memory_for, session_bytes

ENGINE = EngineEntry("a", "s", Bucket(4, 8, 1, 1), "onnxruntime", "a.onnx", "sliced", 0, 0, 0, 0, Decode())
LAYERS = (CachedLayer(2, 8), CachedLayer(1, 16))
ANY_SIZE = GenerationEntry(50, LAYERS, 100, (), (ENGINE,))
SIZES = tuple(replace(ENGINE, id=f"{size}", kind=Decode(capacity=size), backend="tensorrt") for size in (8, 20, 40))
OF_SIZES = replace(ANY_SIZE, engines=SIZES)
# Keys and values of a token.
TOKEN_BYTES = 4 * 2 * (16 + 16)


def test_a_session_counts_its_cache_and_the_one_that_it_moves_from() -> None:
    logits = 4 * 50 * 3
    assert session_bytes(ANY_SIZE, 3, 20) == 3 * 20 * TOKEN_BYTES + logits
    assert session_bytes(OF_SIZES, 3, 7) == 3 * 8 * TOKEN_BYTES + logits
    assert session_bytes(OF_SIZES, 3, 9) == 3 * (20 + 8) * TOKEN_BYTES + logits
    assert session_bytes(OF_SIZES, 3, 40) == 3 * (40 + 20) * TOKEN_BYTES + logits
    with pytest.raises(InputError, match=r"^rows: expected at most 4"):
        session_bytes(OF_SIZES, 5, 7)
    with pytest.raises(InputError, match=r"^capacity: expected at most 40, the tokens of its largest cache, got 41"):
        session_bytes(OF_SIZES, 1, 41)


def test_the_processors_lies_on_the_host_and_has_room_at_once() -> None:
    memory = memory_for(ANY_SIZE, 2, 30, 0)
    assert isinstance(memory, CacheMemory)
    cache = memory.empty()
    assert (cache.rows, cache.capacity) == (2, 30)
    with pytest.raises(InputError, match=r"^session: 31 tokens of a row, it has room for 30; open one with more$"):
        memory.grown(cache, 31, 3)
    memory.close()


def test_on_a_device_room_grows_through_the_sizes_of_engines(device: HostDevice) -> None:
    memory = DeviceMemory(OF_SIZES, 2, 30, 0, lambda: device)
    cache = memory.empty()
    assert (cache.rows, cache.capacity) == (2, 8)
    for tensor in cache.tensors:
        device.to_device(tensor.address, np.ones(tensor.shape, np.float32))
    larger = memory.grown(cache, 21, 5)
    assert larger.capacity == 40, "20 are skipped"
    for number in range(4):
        assert (larger.read(number, 1, 0, 40)[:, :, :5] == 1).all()
        assert not larger.read(number, 1, 5, 40).any()
    assert device.allocated_bytes == cache.bytes + larger.bytes, "until the session has taken it"
    memory.keep(larger)
    assert device.allocated_bytes == larger.bytes
    with pytest.raises(InputError, match="41 tokens of a row, it has room for 40"):
        memory.grown(larger, 41, 5)
    memory.close()
    memory.close()


def test_on_a_device_prompts_are_counted_once_and_stay(device: HostDevice) -> None:
    behind = replace(OF_SIZES, encoder=EncoderEntry(0, 40, (), (CachedLayer(3, 16), CachedLayer(1, 8))))
    of_a_token = 4 * 2 * (3 * 16 + 8)
    assert behind.source_bytes(2, 7) == (2 + 1) * 7 * of_a_token
    assert replace(behind, engines=()).source_bytes(2, 7) == 2 * 7 * of_a_token
    memory = DeviceMemory(behind, 2, 30, 7, lambda: device)
    cache = memory.empty()
    assert cache.source is not None
    assert cache.source.bytes == 2 * 7 * of_a_token
    assert device.allocated_bytes == cache.bytes
    larger = memory.grown(cache, 21, 0)
    assert larger.source is cache.source
    memory.keep(larger)
    assert device.allocated_bytes == larger.bytes
    memory.close()


def test_what_cannot_grow_stays(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory(OF_SIZES, 2, 30, 0, lambda: device)
    cache = memory.empty()

    def none(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(device, "copy_rows", none)
        with pytest.raises(KeyboardInterrupt):
            memory.grown(cache, 9, 5)
    assert device.allocated_bytes == cache.bytes
    assert memory.grown(cache, 9, 5).capacity == 20
    memory.close()
