"""A small folder of sentence-transformers and the bundle that is compiled of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nestforge
import pytest
from nestforge.integrations import SentenceEncoder
from support.sentence_folders import HIDDEN, Layout, classes
from support.tiny_compile import board

PROMPTS = {"prompts": {"query": "time budget ", "passage": "a "}, "default_prompt_name": "passage"}


@pytest.fixture(scope="session")
def sentence_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors of length other than 1, prompts, and texts of at most 12 tokens."""
    layout = Layout("m", lambda m: [m.Pooling(HIDDEN)], config=PROMPTS, transformer={"max_seq_length": 12})
    return layout.write(tmp_path_factory.mktemp("sentences") / "m")


@pytest.fixture(scope="session")
def sentence_bundle(sentence_folder: Path) -> Path:
    """Two submodels, by the budgets ``full`` and ``half``."""
    profile = board(buckets=["2x8", "3x16"], budgets={"full": {}, "half": {"flops": "70 %"}})
    output = sentence_folder.with_suffix(".bundle")
    return nestforge.compile(sentence_folder, profile=profile, output=output, include="budgets")


@pytest.fixture(scope="session")
def encoder(sentence_bundle: Path) -> Iterator[SentenceEncoder]:
    with SentenceEncoder(sentence_bundle) as opened:
        yield opened


@pytest.fixture(scope="session")
def theirs(sentence_folder: Path) -> Any:
    """The library's own model of the folder."""
    return classes().SentenceTransformer(str(sentence_folder), device="cpu", local_files_only=True)
