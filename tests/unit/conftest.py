"""A small real checkpoint and what the exporters make of it; a small real bundle."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from nestforge.exporters.source import ModelSource, open_source
from nestforge.exporters.universal import UniversalModel, load_universal
from support.fake_gpu import Gpu
from support.once import traced_once
from support.small_bundle import (  # noqa: F401  (fixtures)
    edit_manifest,
    exits_bundle,
    expected,
    feeds,
    manifest,
    own_bundle,
    range_bundle,
    tiny_bundle,
)
from support.tiny_models import save_tiny_encoder


@pytest.fixture(scope="session", autouse=True)
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with traced_once(tmp_path_factory):
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("tiny") / "bert")


@pytest.fixture
def source(tiny_folder: Path) -> ModelSource:
    return open_source(tiny_folder)


@pytest.fixture
def universal(source: ModelSource) -> UniversalModel:
    return load_universal(source)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    found = Gpu()
    yield found
    found.thread.close()
    assert found.allocated_bytes == 0
