"""A tiny ordinary encoder with pooling, and a corpus that its tokenizer knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from nestforge.compiler.examples.corpus import Corpus, read_corpus
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from support.tiny_models import add_pooling, corpus, save_tiny_encoder


@dataclass(frozen=True)
class Ordinary:
    """A model folder that was never nested, and texts."""

    model: Path
    text: Path

    @property
    def source(self) -> ModelSource:
        return open_source(self.model)

    @property
    def universal(self) -> UniversalModel:
        return load_universal(self.source)

    @property
    def corpus(self) -> Corpus:
        return read_corpus(self.text)


@pytest.fixture(scope="session")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Ordinary:
    folder = tmp_path_factory.mktemp("ordinary")
    model = save_tiny_encoder(folder / "tiny")
    add_pooling(model)
    return Ordinary(model, corpus(folder / "corpus.txt"))
