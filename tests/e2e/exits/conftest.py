"""Bundles with exits, of which tests damage copies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from exit_rows import write_text_bundle
from nestforge.runtime.calibrate import measure as measure_exits


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """How long things take is not looked at here, so each is timed once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_SAMPLES", "_LEAST_ROUNDS", "_MOST_ROUNDS"):
            patch.setattr(measure_exits, name, 1)
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_bundle(tmp_path_factory.mktemp("bundles") / "exits.bundle")


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "own.bundle"))
