"""A small Llama with a tokenizer, compiled with engines that keep a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from nestforge.runtime.model import ElasticModel, load
from support.generating_bundle import compile_generating, save_text_llama
from support.greedy import greedy as transformers_greedy


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="package")
def llama_bundle(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_generating(llama, tmp_path_factory.mktemp("bundles") / "llama.bundle")


@pytest.fixture
def model(llama_bundle: Path) -> Iterator[ElasticModel]:
    with load(llama_bundle, threads=1) as opened:
        yield opened


@pytest.fixture(scope="package")
def greedy(llama: Path) -> Callable[[list[int], int], list[int]]:
    """What transformers generates behind a prompt, the most likely token each time."""
    return partial(transformers_greedy, llama)
