from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
from nestforge.bundle.open_bundle import open_bundle
from support.commands import error_of, json_of, nestforge, shown, usage_of


def test_one_submodel_as_an_onnx_file(compiled: Any, tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    says = shown("export", compiled.bundle, "--format", "onnx", "-o", path, "--submodel", "L").splitlines()
    assert says[0].split(maxsplit=1) == ["submodel", "L, fp32, 1x8"]
    assert says[1].endswith("equal to the bit")
    assert says[-1] == f"wrote {path}, {path.stat().st_size / 1e6:.1f} MB"
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    manifest = open_bundle(compiled.bundle).manifest
    assert [one.name for one in session.get_inputs()] == [spec.name for spec in manifest.inputs]
    assert session.get_modelmeta().custom_metadata_map["nestforge.submodel"] == manifest.submodel("L").id
    line = error_of("export", compiled.bundle, "--format", "onnx", "-o", path)
    assert line == f"{path}: exists already; choose another file"


def test_json_and_usage(compiled: Any, tmp_path: Path) -> None:
    data = json_of("export", compiled.bundle, "--format", "onnx", "-o", tmp_path / "a.onnx", "--bucket", "1x8")
    assert (data["files"], data["precision"]) == ([str(tmp_path / "a.onnx")], "fp32")
    assert data["parity"]["max_abs"] < 1e-5
    assert "--output" in usage_of("export", compiled.bundle, "--format", "onnx")
    assert "tflite" in usage_of("export", compiled.bundle, "--format", "tflite", "-o", "x")
    failed = nestforge("export", compiled.bundle, "--format", "onnx", "-o", tmp_path / "b.onnx", "--bucket", "4x8")
    assert "has 1x8; got 4x8" in failed.stderr.splitlines()[-1]
    assert not (tmp_path / "b.onnx").exists()


def test_a_repository_for_triton(compiled: Any, tmp_path: Path) -> None:
    models = tmp_path / "models"
    says = shown("export", compiled.bundle, "--format", "triton", "-o", models)
    assert says == f"wrote {models} with model tiny; tritonserver --model-repository {models}\n"
    assert (models / "tiny" / "1" / "bundle" / "manifest.json").samefile(compiled.bundle / "manifest.json")
    assert json_of("export", compiled.bundle, "--format", "triton", "-o", tmp_path / "again")["model"] == "tiny"
    assert "exists already" in error_of("export", compiled.bundle, "--format", "triton", "-o", models)
    line = usage_of("export", compiled.bundle, "--format", "triton", "-o", tmp_path / "c", "--submodel", "L")
    assert "--submodel, --bucket and --task are for onnx and ortpackage" in line


def test_a_package_for_onnx_runtime(compiled: Any, tmp_path: Path) -> None:
    package = tmp_path / "my.ortpackage"
    asked = ("export", compiled.bundle, "--format", "ortpackage", "-o")
    says = shown(*asked, package, "--submodel", "L", "--bucket", "1x8")
    size = sum(path.stat().st_size for path in package.rglob("*") if path.is_file()) / 1e6
    assert says == f"wrote {package} with L (laptop-x86), {size:.1f} MB; ONNX Runtime opened each on the processor\n"
    twice = usage_of("export", compiled.bundle, compiled.bundle, "--format", "onnx", "-o", tmp_path / "two")
    assert "onnx is of one bundle; ortpackage takes several" in twice
    data = json_of(*asked, tmp_path / "all")
    assert len(data["components"]) == len(open_bundle(compiled.bundle).manifest.submodels)
