"""A small Llama with a tokenizer, compiled with engines that keep a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nestforge.runtime.model import ElasticModel, load
from support.generating_bundle import compile_generating, save_text_llama


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
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()

    def generate(prompt: list[int], tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        found = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        return list(found[0, len(prompt) :].tolist())

    return generate
