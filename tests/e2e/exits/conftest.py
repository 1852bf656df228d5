"""Bundles with exits, of which tests damage copies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.exit_bundles import timed_once, write_text_bundle


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with timed_once():
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_bundle(tmp_path_factory.mktemp("bundles") / "exits.bundle")


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "own.bundle"))
