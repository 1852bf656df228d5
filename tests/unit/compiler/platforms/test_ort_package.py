"""Packages of ONNX Runtime: its own library chooses and opens every component, which answers as the bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import onnxruntime
import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.platforms import ort_package
from nestforge.compiler.platforms.ort_package import _require_opens, export_ort_package
from nestforge.errors import BundleIncompatibleError, NestforgeError, OutputError, ParityError
from nestforge.runtime.inputs.arrays import random_feeds
from support.tiny_compile import board

BERT = Path(__file__).parents[3] / "golden" / "peft" / "bert" / "base"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    profile = board(budgets={"full": {}}, buckets=["1..2x1..8"])
    return compile_bundle(BERT, profile, tmp_path_factory.mktemp("packages") / "b", levels={"ffn": (0.5, 1.0)})


def test_each_submodel_is_a_component_that_answers_as_the_bundle(bundle: Path, tmp_path: Path) -> None:
    found = export_ort_package(bundle, tmp_path / "tiny.ortpackage")
    package = Path(found.package)
    large, small = (one.id for one in open_bundle(bundle).manifest.largest_first)
    assert [*found.components] == [large, small]
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert files == {f"{large}/cpu/model.onnx", f"{small}/cpu/model.onnx", "manifest.json"}
    manifest = json.loads((package / "manifest.json").read_text())
    assert manifest["components"][small]["variants"]["cpu"] == {
        "variant_directory": f"{small}/cpu",
        "ep": "CPUExecutionProvider",
        "executor_info": {"ort": {"model_file": "model.onnx"}},
    }
    with nestforge.load(bundle) as model:
        feeds = random_feeds(model.inputs, Bucket(2, 7))
        for name in found.components:
            session = onnxruntime.InferenceSession(package / name / "cpu" / "model.onnx")
            expected = model(feeds, submodel=name).outputs
            for output, array in zip(expected, session.run(list(expected), feeds), strict=True):
                np.testing.assert_allclose(array, expected[output], atol=1e-5)
    _require_opens(package, found.components)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"executor_info": {"ort": {"model_file": "other.onnx"}}}, "other.onnx"),
        ({"ep": "CUDAExecutionProvider"}, "No suitable model variant found"),
        ({"variant_directory": "nowhere"}, "does not exist"),
    ],
)
def test_what_onnx_runtime_does_not_open_leaves_nothing(
    changed: dict[str, Any], says: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ort_package._manifest

    def wrong(components: Any) -> dict[str, Any]:
        found = made(components)
        (component,) = found["components"].values()
        component["variants"]["cpu"] |= changed
        return found

    monkeypatch.setattr(ort_package, "_manifest", wrong)
    refused(ParityError, says, bundle, tmp_path)


def test_a_release_without_packages_and_a_folder_that_exists_are_one_line(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_package, "_API", 1 << 20)
    ort_package._library.cache_clear()
    refused(BundleIncompatibleError, "opens no packages, so none can be proven", bundle, tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="out: exists already"):
        export_ort_package(bundle, tmp_path / "out")


def refused(error: type[NestforgeError], says: str, bundle: Path, folder: Path) -> None:
    with pytest.raises(error) as failure:
        export_ort_package(bundle, folder / "out", submodel="50%")
    assert says in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not list(folder.iterdir())
