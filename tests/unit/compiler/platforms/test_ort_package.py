"""Packages of ONNX Runtime: its own library chooses and opens every component, which answers as the bundle."""

import hashlib
import json
from dataclasses import replace
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
from nestforge.compiler.platforms.ort_package import _WEIGHTS as FOLDER
from nestforge.compiler.platforms.ort_package import export_ort_package
from nestforge.errors import BundleIncompatibleError, InputError, NestforgeError, OutputError, ParityError
from nestforge.runtime.inputs.arrays import random_feeds
from support.tiny_compile import board, save_tiniest

BERT = Path(__file__).parents[3] / "golden" / "peft" / "bert" / "base"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    profile = board(budgets={"full": {}}, buckets=["1..2x1..8"])
    return compile_bundle(BERT, profile, tmp_path_factory.mktemp("packages") / "b", levels={"ffn": (0.5, 1.0)})


@pytest.fixture(scope="module")
def for_tensorrt(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for another back end, with the same weights."""
    profile = board(name="gpu", backend="tensorrt", budgets={"full": {}}, buckets=["1..2x1..8"])
    folder = tmp_path_factory.mktemp("packages")
    return compile_bundle(BERT, profile, folder / "t", levels={"ffn": (0.5, 1.0)}, emit_only=True)


def test_each_submodel_is_a_component_that_answers_as_the_bundle(bundle: Path, tmp_path: Path) -> None:
    found = export_ort_package([bundle], tmp_path / "tiny.ortpackage")
    package = Path(found.package)
    large, small = (one.id for one in open_bundle(bundle).manifest.largest_first)
    assert [*found.components] == [large, small]
    (asset,) = (package / "shared_assets").iterdir()
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    weights = f"shared_assets/{asset.name}/weights.safetensors"
    assert files == {f"{large}/board/model.onnx", f"{small}/board/model.onnx", weights, "manifest.json"}
    assert found.bytes == sum((package / file).stat().st_size for file in files)
    lines = f"{hashlib.sha256((package / weights).read_bytes()).hexdigest()}  weights.safetensors\n"
    assert asset.name == f"sha256-{hashlib.sha256(lines.encode()).hexdigest()}"
    manifest = json.loads((package / "manifest.json").read_text())
    assert manifest["components"][small]["variants"]["board"] == {
        "variant_directory": f"{small}/board",
        "ep": "CPUExecutionProvider",
        "executor_info": {
            "ort": {"model_file": "model.onnx", "session_options": {FOLDER: asset.name.replace("-", ":")}}
        },
    }
    with nestforge.load(bundle) as model:
        feeds = random_feeds(model.inputs, Bucket(2, 7))
        for name, variants in found.components.items():
            (file,) = variants["board"].files
            options = onnxruntime.SessionOptions()
            options.add_session_config_entry(FOLDER, str(asset))
            session = onnxruntime.InferenceSession(file, options)
            expected = model(feeds, submodel=name).outputs
            for output, array in zip(expected, session.run(list(expected), feeds), strict=True):
                np.testing.assert_allclose(array, expected[output], atol=1e-5)


def test_bundles_of_several_profiles_are_variants_that_share_weights(
    bundle: Path, for_tensorrt: Path, tmp_path: Path
) -> None:
    found = export_ort_package([for_tensorrt, bundle], tmp_path / "both")
    package = Path(found.package)
    assert [[*variants] for variants in found.components.values()] == [["gpu", "board"]] * 2
    for component in json.loads((package / "manifest.json").read_text())["components"].values():
        providers = {name: one["ep"] for name, one in component["variants"].items()}
        assert providers == {"board": "CPUExecutionProvider", "gpu": "TensorrtExecutionProvider"}
    assert len([*(package / "shared_assets").iterdir()]) == 1


def test_variants_between_which_onnx_runtime_would_not_choose_are_one_line(bundle: Path, tmp_path: Path) -> None:
    other = compile_bundle(
        save_tiniest(tmp_path / "other", vocab_size=65),
        board(budgets={"full": {}}, buckets=["1..2x1..8"]),
        tmp_path / "o",
    )
    for bundles, says in (
        ([bundle, bundle], f"{bundle}: is for CPUExecutionProvider, as {bundle} is; ONNX Runtime chooses by provider"),
        ([bundle, other], f"{other}: is of another model than {bundle}; export them apart"),
    ):
        with pytest.raises(InputError) as failure:
            export_ort_package(bundles, tmp_path / "out")
        assert says in str(failure.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("board", "its profile is called board, as that of"),
        ("../../elsewhere", "profile '../../elsewhere' names a folder; expected letters, digits and ._-"),
    ],
)
def test_names_of_profiles_are_those_of_folders(name: str, says: str, bundle: Path, for_tensorrt: Path) -> None:
    board, gpu = open_bundle(bundle), open_bundle(for_tensorrt)
    provenance = replace(gpu.manifest.provenance, profile={**gpu.manifest.provenance.profile, "name": name})
    with pytest.raises(InputError) as failure:
        ort_package._variants([board, replace(gpu, manifest=replace(gpu.manifest, provenance=provenance))], None, None)
    assert says in str(failure.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"executor_info": {"ort": {"model_file": "other.onnx"}}}, "other.onnx"),
        ({"executor_info": {"ort": {"model_file": "model.onnx"}}}, "weights.safetensors"),
        ({"ep": "CUDAExecutionProvider"}, "No suitable model variant found"),
        ({"variant_directory": "nowhere"}, "does not exist"),
    ],
)
def test_what_onnx_runtime_does_not_open_leaves_nothing(
    changed: dict[str, Any], says: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = ort_package._Variant.stated
    monkeypatch.setattr(ort_package._Variant, "stated", lambda own, provider: {**stated(own, provider), **changed})
    refused(ParityError, says, bundle, tmp_path)


def test_a_release_without_packages_and_a_folder_that_exists_are_one_line(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_package, "_API", 1 << 20)
    ort_package._library.cache_clear()
    refused(BundleIncompatibleError, "opens no packages, so none can be proven", bundle, tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="out: exists already"):
        export_ort_package([bundle], tmp_path / "out")


def refused(error: type[NestforgeError], says: str, bundle: Path, folder: Path) -> None:
    with pytest.raises(error) as failure:
        export_ort_package([bundle], folder / "out", submodel="50%")
    assert says in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not list(folder.iterdir())
