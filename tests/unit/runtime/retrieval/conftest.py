"""The tiny bundle with receipts that cover its engines, open, and an index of random rows."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.runtime.model import ElasticModel
from nestforge.runtime.retrieval.index import Index
from numpy.typing import NDArray


def cover(data: dict[str, Any]) -> None:
    """Gives every engine of a manifest's JSON a receipt about its own file, the weight store and both outputs."""
    hashes = {entry["path"]: entry["sha256"] for entry in data["files"]}
    figures = dict.fromkeys(("max_abs", "max_rel", "max_rms", "float32_max_abs", "float32_rms"), 0.0) | {
        "min_cosine": 1.0
    }
    for engine in data["engines"]:
        engine["parity"] |= {
            "graph_sha256": hashes[engine["file"]],
            "weights_sha256": hashes[WEIGHTS_NAME],
            "outputs": [{"name": "hidden", **figures}, {"name": "total", **figures}],
        }


@pytest.fixture
def bundle(
    tiny_bundle: Path, tmp_path: Path, edit_manifest: Callable[[Path, Callable[[dict[str, Any]], object]], None]
) -> Path:
    """A copy that a test may change."""
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "covered.bundle"))
    edit_manifest(folder, cover)
    return folder


@pytest.fixture
def model(bundle: Path) -> Iterator[ElasticModel]:
    with nestforge.load(bundle, threads=1) as opened:
        yield opened


@pytest.fixture
def index(model: ElasticModel, feeds: Callable[..., dict[str, NDArray[np.int64]]]) -> Index:
    return Index.build(model, feeds(30, 8), ids=[f"row {i}" for i in range(30)])
