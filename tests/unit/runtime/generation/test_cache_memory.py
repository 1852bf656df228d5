"""Memory of sessions, and the place of their caches."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import Decode, EngineEntry
from nestforge.bundle.entries.generation_entry import CachedLayer, EncoderEntry, GenerationEntry
from nestforge.errors import InputError, SelectionError
from nestforge.runtime.engines.memory import engine_needs
from nestforge.runtime.generation.cache_memory import CacheMemory, DeviceMemory, memory_for, session_bytes
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.fake_gpu import HostDevice

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
    memory = memory_for(ANY_SIZE, 2, 30, 0, None)
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
    memory.release_others(larger)
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
    assert cache.source.bytes == 2 * 7 * of_a_token
    assert device.allocated_bytes == cache.bytes
    larger = memory.grown(cache, 21, 0)
    assert larger.source is cache.source
    memory.release_others(larger)
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


LARGEST = "no limit given: the largest submodel"
MANY = 40  # rows of 256 tokens, which take more than one engine does


@pytest.fixture
def all_mb(llama_bundle: Path) -> float:
    """Bytes of all engines that generate, packed, and of a cache of a few tokens."""
    with load(llama_bundle) as model:
        entry = model.bundle.manifest.generation
        needs = engine_needs(model.bundle, entry.engines)
    return sum(need.weight_bytes + need.own_bytes for need in needs) / 1e6 + 0.1


def writers_in(model: ElasticModel, rows: int) -> list[str]:
    """The submodels that may write in a session of so many rows."""
    found = []
    with model.session(rows, capacity=256) as session:
        for submodel in ("ffn8", "ffn16", "ffn24", "ffn32"):
            try:
                model.generate([5], session=session, max_tokens=2, submodel=submodel)
            except SelectionError as refused:
                line = f"submodel {submodel}: the memory_mb of this model leaves no room for it; there is room for "
                if not str(refused).startswith(line):
                    raise
            else:
                found.append(submodel)
    return found


def test_a_cache_that_is_gone_leaves_room_for_more_engines(llama_bundle: Path, all_mb: float) -> None:
    """Engines that may be open are decided by every call, not by the first for good."""
    with load(llama_bundle, memory_mb=all_mb, threads=1) as model:
        tight = writers_in(model, MANY)
        assert 0 < len(tight) < 4
        assert writers_in(model, 1) == ["ffn8", "ffn16", "ffn24", "ffn32"]
        assert model.generate([5], max_tokens=3).rows[0].runs[0].reason == LARGEST


def test_open_engines_make_room_for_a_cache(llama_bundle: Path, all_mb: float) -> None:
    with load(llama_bundle, memory_mb=all_mb, threads=1) as model:
        first = model.generate([5], max_tokens=3).rows[0].tokens
        assert len(writers_in(model, 1)) == len(model.generate.open_submodels) == 4
        tight = writers_in(model, MANY)
        assert 0 < len(tight) < 4
        assert set(model.generate.open_submodels) == set(tight)
        assert model.generate([5], max_tokens=3).rows[0].tokens == first


def test_nothing_is_closed_while_it_generates(llama_bundle: Path, all_mb: float) -> None:
    with load(llama_bundle, memory_mb=all_mb, threads=1) as model:
        writers_in(model, 1)
        with model.generate.stream([5], max_tokens=20) as generation:
            next(generation)
            with pytest.raises(SelectionError, match=r"^memory_mb=\S+: a cache of \S+ MB, \S+ MB are left; ask for"):
                model.session(rows=MANY, capacity=256)
            assert len(list(generation)) == 19
        assert model.session(rows=MANY, capacity=256).rows == MANY
