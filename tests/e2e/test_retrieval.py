"""Retrieval across compiles and processes: which bundle may answer with an index, and that torch is not needed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bundle.files import WEIGHTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.errors import InputError
from nestforge.runtime.retrieval.compare import compare
from nestforge.runtime.retrieval.index import Index

OTHER = Path(__file__).parents[1] / "golden" / "bundle-ranges"
TEXTS = ["the quick fox", "a lazy dog", "the budget of a model", "run the engine", "shape and time", "compile a test"]

WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {"torch", "transformers", "onnx", "safetensors", "nestforge.compiler", "nestforge.exporters"}:
            raise ImportError(name + " is not on this device")

sys.meta_path.insert(0, Absent())
import nestforge
from nestforge.runtime.retrieval.index import Index
with nestforge.load(sys.argv[1], residency="shared") as model:
    Index.build(model, sys.argv[3:]).save(sys.argv[2])
    print(Index.load(sys.argv[2]).search(model, sys.argv[3:], k=1, submodel="XL").ids[:, 0].tolist())
"""


@pytest.fixture
def bundle(compiled: Any) -> Path:
    """Every level at two buckets."""
    return Path(compiled.bundle)


@pytest.fixture
def index(bundle: Path, tmp_path: Path) -> Index:
    with nestforge.load(bundle, threads=1) as model:
        Index.build(model, TEXTS).save(tmp_path / "texts.index")
    return Index.load(tmp_path / "texts.index")


def test_a_device_without_torch_builds_and_searches(bundle: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", WITHOUT_TORCH, str(bundle), str(tmp_path / "i.index"), *TEXTS]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{list(range(len(TEXTS)))}\n", "")


def test_every_submodel_answers_nearer_the_more_it_keeps(bundle: Path, index: Index) -> None:
    with nestforge.load(bundle, threads=1) as model:
        comparison = compare(model, index, [f"{text} of" for text in TEXTS], k=3)
    assert len(comparison.submodels) == len(open_bundle(bundle).manifest.submodels)
    assert comparison.submodels[0].recall_at_k == 1
    flops = [each.flops for each in comparison.submodels]
    assert flops == sorted(flops, reverse=True)
    assert np.mean([each.recall_at_k for each in comparison.submodels]) > 0.5  # three of six by chance


def test_a_bundle_compiled_again_from_the_same_weights_answers(
    bundle: Path, index: Index, model: Path, profile: Path, text: Path, tmp_path: Path
) -> None:
    again = compile_bundle(
        model, profile, tmp_path / "again.bundle", text=text, include="budgets", submodels=["ffn8-heads1"]
    )
    stores = [(folder / WEIGHTS_NAME).read_bytes() for folder in (bundle, again)]
    assert stores[0] == stores[1]
    with nestforge.load(again, threads=1) as opened:
        found = index.search(opened, TEXTS, k=1, submodel="ffn8-heads1")
    assert found.submodel == "ffn8-heads1"


def test_another_universal_is_refused(index: Index) -> None:
    with nestforge.load(OTHER, threads=1) as model, pytest.raises(InputError, match="built by another universal model"):
        index.search(model, TEXTS)
