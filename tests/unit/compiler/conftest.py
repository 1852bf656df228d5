from dataclasses import dataclass
from pathlib import Path

import pytest
from nestforge.compiler.engines.build_engine import EngineBuilder
from nestforge.compiler.examples.corpus import Corpus, read_corpus
from nestforge.compiler.graph.template import Template
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from support.tiny_compile import board, builder_in, save_tiniest, template_of
from support.tiny_models import add_pooling, corpus, save_tiny_encoder


@pytest.fixture(scope="session")
def tiniest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers with pooling and a tokenizer."""
    folder = save_tiniest(tmp_path_factory.mktemp("tiniest") / "bert")
    add_pooling(folder)
    return folder


@pytest.fixture(scope="session")
def template(tiniest: Path) -> Template:
    return template_of(load_universal(open_source(tiniest)))


@pytest.fixture
def builder(tiniest: Path, template: Template, tmp_path: Path) -> EngineBuilder:
    """An engine builder with a staging folder of its own, for a device that is not this host."""
    return builder_in(tmp_path / "stage", load_universal(open_source(tiniest)), template, board())


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
