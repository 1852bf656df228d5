"""A host with a GPU that does not exist, and a tiny bundle of engines for TensorRT."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from nestforge.compiler.graph.template import Template
from nestforge.exporters.source import open_source
from nestforge.exporters.universal import load_universal
from support.fake_cuda import World
from support.fake_tensorrt import host_with_gpu
from support.tiny_compile import board, builder_in, write_levels


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with host_with_gpu(tmp_path / "cache") as found:
        yield found


@pytest.fixture(scope="session")
def emitted(tiniest: Path, template: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of four levels at one bucket, as a compile for TensorRT leaves it: graphs, no plans."""
    universal = load_universal(open_source(tiniest))
    profile = board(backend="tensorrt")
    builder = builder_in(tmp_path_factory.mktemp("emitted") / "bundle", universal, template, profile)
    folder = write_levels(builder)
    shutil.rmtree(builder.stage.work)
    return folder


@pytest.fixture
def compiled(emitted: Path, tmp_path: Path) -> Path:
    """A copy of it to build in, or to damage."""
    return Path(shutil.copytree(emitted, tmp_path / "stage"))
