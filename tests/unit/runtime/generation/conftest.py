"""A small Llama with a tokenizer, compiled with KV-cache engines; and a device."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.fake_cuda import World
from support.fake_gpu import HostDevice
from support.generating import greedy as transformers_greedy
from support.generating import llama_folder


@pytest.fixture
def device() -> Iterator[HostDevice]:
    """The processor in the place of a GPU; all that a test took of its memory is given back."""
    found = HostDevice()
    yield found
    assert found.allocated_bytes == 0


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory) / "model"


@pytest.fixture(scope="package")
def llama_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory) / "bundle"


@pytest.fixture
def model(llama_bundle: Path) -> Iterator[ElasticModel]:
    with load(llama_bundle, threads=1) as opened:
        yield opened


@pytest.fixture
def interrupt_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[World, Callable[[list[str]], bool]], None]:
    """A user's interruption while the GPU of a world is waited for, the first time that its calls are such."""

    def patch(world: World, when: Callable[[list[str]], bool]) -> None:
        from nestforge.runtime.device.cuda_memory import Stream

        waits = Stream.wait

        def interrupted(stream: Stream) -> None:
            if when(world.calls) and "interrupted" not in world.calls:
                world.calls.append("interrupted")
                raise KeyboardInterrupt
            waits(stream)

        monkeypatch.setattr(Stream, "wait", interrupted)

    return patch


@pytest.fixture(scope="package")
def greedy(llama: Path) -> Callable[[list[int], int], list[int]]:
    """Text of transformers behind a prompt, the most likely token each time."""
    return partial(transformers_greedy, llama)
