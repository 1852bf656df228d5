"""A host with a GPU that does not exist, and a tiny bundle of engines for TensorRT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_tensorrt import World, installed
from nestforge.compiler.build_engine import EngineBuilder
from tiny_compile import reseal, write_levels


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = World()
    with installed(found):
        yield found
    assert not found.allocated  # whatever a test does, nothing stays allocated


@pytest.fixture
def compiled(builder: EngineBuilder) -> Path:
    """A bundle of four levels at one bucket, as a compile for TensorRT leaves it: graphs, no plans."""
    folder = write_levels(builder)
    shutil.rmtree(builder.stage.work)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for engine in manifest["engines"]:
        engine["backend"] = "tensorrt"
    manifest["provenance"]["profile"]["backend"] = "tensorrt"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    reseal(folder)
    return folder
