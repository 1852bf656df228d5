"""Models, bundles, calibrations and data with exits that commands refuse: one line each, nothing written.

What may be wrong of each is in the tables of unit tests; here one of a kind goes all the way.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from nestforge.bundle.manifest import CALIBRATION_NAME, MANIFEST_NAME, SCHEMA_VERSION
from nestforge.tools.cli import main
from support import sealing
from support.cost_eff_models import save_tiny
from support.exit_bundles import (
    make_rows,
    requests,
    timed_once,
    write_arrays,
    write_exits_bundle,
    write_exits_manifest,
    write_text_bundle,
)
from support.processes import needs_root, nobody
from support.refusals import refused, says

BUDGET = "mean_flops<=3500"
Change = Callable[[dict[str, Any]], object]


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


@pytest.fixture(scope="module")
def kept(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated bundle."""
    folder = tmp_path_factory.mktemp("calibrated")
    bundle = Path(shutil.copytree(written, folder / "own.bundle"))
    path = write_arrays(folder / "rows.npz", 20)
    arguments = ["calibrate", bundle, "--data", path, "--budget", BUDGET, "--name", "lean"]
    assert CliRunner().invoke(main, list(map(str, arguments))).exit_code == 0
    return bundle


@pytest.fixture
def calibrated(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "own.bundle"))


def edited(change: Change) -> Callable[[bytes], bytes]:
    return lambda raw: sealing.edited(raw, change)


CALIBRATIONS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda raw: raw[: len(raw) // 2], "not JSON ("),
    "another schema": (edited(lambda data: data.update(schema_version=3)), "schema_version '3', expected 1"),
    "one changed digit": (lambda raw: raw.replace(b'"rows": 20', b'"rows": 21', 1), "its seal is [...] its content"),
    "no seal": (lambda raw: raw[:-80] + b"\n}\n", "has no seal at its end, or was changed since it was sealed"),
    "a key twice": (
        lambda raw: raw.replace(b'"schema_version"', b'"policies": [], "schema_version"'),
        "not JSON (a key stands twice among defaults, manifest_sha256, policies, policies, schema_version, seal)",
    ),
    "of another bundle": (
        edited(lambda data: data.update(manifest_sha256="0" * 64)),
        "belongs to another manifest than this bundle's",
    ),
    "a threshold beyond numbers": (
        lambda raw: sealing.sealed_again(re.sub(rb'("thresholds": \[\s*)[^\s,]+', rb"\g<1>1e999", raw)),
        "policies[0]: thresholds[0]: expected a finite number, got inf",
    ),
    "too few thresholds": (
        edited(lambda data: data["policies"][0].update(thresholds=[0.3])),
        "policy 'lean' of 'depth4': 1 thresholds, expected 2",
    ),
}


@pytest.mark.parametrize(("change", "message"), CALIBRATIONS.values(), ids=CALIBRATIONS)
def test_calibrations(calibrated: Path, tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path = calibrated / CALIBRATION_NAME
    path.write_bytes(change(path.read_bytes()))
    rows = write_arrays(tmp_path / "rows.npz", 20)
    for arguments in (
        ("run", calibrated, "--text", "w1"),
        ("run", calibrated, "--text", "w1", "--exits", "off"),
        ("calibrate", calibrated, "--data", rows, "--budget", BUDGET),
    ):
        found = refused(tmp_path, *arguments)
        assert says(found.removeprefix(f"{path}: "), message)
        assert found.startswith(str(path)), "the line says where"
        assert re.search(r"; (use the nestforge release that wrote it, or )?remove it and calibrate again", found)


def test_a_calibration_that_is_a_link_or_a_folder(calibrated: Path, tmp_path: Path) -> None:
    path = calibrated / CALIBRATION_NAME
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    assert refused(tmp_path, "run", calibrated, "--text", "w1").startswith(f"{path}: expected a regular file")
    path.unlink()
    path.mkdir()
    assert refused(tmp_path, "run", calibrated, "--text", "w1").startswith(f"{path}: expected a regular file")


def test_a_policy_of_another_name_or_submodel(calibrated: Path, tmp_path: Path) -> None:
    found = refused(tmp_path, "run", calibrated, "--text", "w1", "--exits", "fast")
    assert found == "no calibrated exits 'fast' of submodel depth4; it has lean"
    found = refused(tmp_path, "run", calibrated, "--text", "w1", "--exits", "lean", "--submodel", "S")
    assert found == "no calibrated exits 'lean' of submodel depth2; it has none"


MANIFESTS: dict[str, tuple[Change, str]] = {
    "no exits": (lambda d: d.pop("exits"), "engine depth2.to1@b1-s8: segment 'to1', but this manifest has no exits"),
    "a segment missing": (lambda d: d["exits"]["segments"].pop(1), "exits: segments end at [...] depth has [1, 2, 4]"),
    "a later schema": (
        lambda d: d.update(schema_version=SCHEMA_VERSION + 1),
        f"schema_version '{SCHEMA_VERSION + 1}', expected {SCHEMA_VERSION}; use [...] or compile again",
    ),
}


@pytest.mark.parametrize(("change", "message"), MANIFESTS.values(), ids=MANIFESTS)
def test_manifests(bundle: Path, tmp_path: Path, change: Change, message: str) -> None:
    data = json.loads((bundle / MANIFEST_NAME).read_text())
    change(data)
    write_exits_manifest(bundle, data)
    rows = write_arrays(tmp_path / "rows.npz", 20)
    for arguments in (
        ("run", bundle, "--text", "w1"),
        ("inspect", bundle),
        ("verify", bundle),
        ("calibrate", bundle, "--data", rows, "--budget", BUDGET),
    ):
        found = refused(tmp_path, *arguments)
        assert says(found, f"{bundle / MANIFEST_NAME}: {message}")


@pytest.mark.parametrize("name", ["to2.b1-s8.onnx", "to4.b4-s16.onnx"])
def test_segment_files_that_are_gone_or_cut(bundle: Path, tmp_path: Path, name: str) -> None:
    whole = (bundle / name).read_bytes()
    (bundle / name).write_bytes(whole[:-1])
    found = refused(tmp_path, "run", bundle, "--text", "w1")
    assert found.startswith(f"{bundle / name}: {len(whole) - 1} bytes, expected {len(whole)}; fetch the bundle again")
    (bundle / name).unlink()
    assert refused(tmp_path, "run", bundle, "--text", "w1").startswith(f"{bundle / name}: missing; fetch the bundle")


def test_a_segment_of_another_interface_under_the_same_name(tmp_path: Path) -> None:
    """Under new hashes: what is found when the engine is opened."""
    bundle = write_exits_bundle(tmp_path / "b")
    shutil.copy(bundle / "to4.b1-s8.onnx", bundle / "to2.b1-s8.onnx")
    sealing.reseal(bundle)
    np.savez(tmp_path / "in.npz", **requests([3]))
    found = refused(tmp_path, "run", bundle, "--inputs", tmp_path / "in.npz", "--exits", "-1")
    assert found.startswith("engine depth4.to2@b1-s8: outputs are ")


def test_damaged_arrays(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    np.savez_compressed(path, **requests([16] * 8))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 4] ^= 0xFF
    path.write_bytes(raw)
    for arguments in (("run", bundle, "--inputs", path), ("calibrate", bundle, "--data", path, "--budget", BUDGET)):
        assert refused(tmp_path, *arguments) == (
            f"{path}: expected an NPZ file of plain arrays, as numpy.savez writes it"
        )


ROW = {"text": "w1 w2", "label": 0}
DATA: dict[str, tuple[str, bytes | dict[str, Any] | None, str]] = {
    "missing": ("a.jsonl", None, "cannot be read (No such file or directory)"),
    "labels of some": (
        "a.jsonl",
        "".join(f"{json.dumps(row)}\n" for row in (ROW, {"text": "w1"})).encode(),
        "line 2: has no 'label'[...]; label all rows or none",
    ),
    "ids beyond the vocabulary": (
        "a.npz",
        make_rows(20) | {"input_ids": np.full((20, 16), 16)},
        "input input_ids: values 16..16, expected 0..15; do they come from this bundle's own tokenizer?",
    ),
}


@pytest.mark.parametrize(("name", "content", "message"), DATA.values(), ids=DATA)
def test_data(bundle: Path, tmp_path: Path, name: str, content: bytes | dict[str, Any] | None, message: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **content)
    found = refused(tmp_path, "calibrate", bundle, "--data", path, "--budget", BUDGET)
    assert says(found.removeprefix(f"{path}: "), message)
    assert found.startswith(str(path)), "the line says where"


OPTIONS: dict[str, tuple[list[str], int, str]] = {
    "a share out of reach": (["--budget", "mean_flops<=1%"], 1, " % of the whole engine's [...]; ask for more"),
    "no batch": (["--batch", "0"], 2, "'--batch': 0 is not in the range x>=1; see"),
    "unknown rule": (["--rule", "alone"], 2, "'--rule': 'alone' is not one of 'per_row', 'batch_max'; see"),
    "unknown submodel": (["--submodel", "depth3"], 1, "no submodel 'depth3' [...]; it has depth2 (S), depth4 (XL)"),
}


@pytest.mark.parametrize(("options", "code", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options(bundle: Path, tmp_path: Path, options: list[str], code: int, message: str) -> None:
    path = write_arrays(tmp_path / "rows.npz", 20)
    if "--budget" not in options:
        options = ["--budget", BUDGET, *options]
    found = refused(tmp_path, "calibrate", bundle, "--data", path, *options, code=code)
    assert says(found, f"[...]{message}")


@needs_root
def test_a_bundle_that_cannot_be_written(bundle: Path, tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "rows.npz", 20)
    with nobody(bundle, path.parent):
        found = refused(tmp_path, "calibrate", bundle, "--data", path, "--budget", BUDGET)
    assert found == f"{bundle}: cannot be written, so a calibration could not be saved; make it writable"


def sidecar(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "cost_eff.json"
        data = json.loads(path.read_text())
        for key, value in changes.items():
            data["gate" if key == "tau" else "exits"][key] = value
        path.write_text(json.dumps(data))

    return change


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no sidecar": (lambda folder: (folder / "cost_eff.json").unlink(), "cannot be read (No such file"),
    "no JSON": (lambda folder: (folder / "cost_eff.json").write_text("{'exits': 1}"), "not JSON ("),
    "an exit behind the last layer": (
        sidecar(layers=[1, 3, 5]),
        "exits: the last one is after layer 5, but config.json has num_hidden_layers 4; a layer behind the",
    ),
    "other classes than the weights": (
        sidecar(classes=5),
        "tensor exits.1.weight has shape [3, 32]; expected [5, 32] as config.json and cost_eff.json say of",
    ),
    "a threshold that is infinite": (sidecar(tau=[float("inf"), 0.3]), "gate: [...] a finite number, got inf"),
}


@pytest.mark.parametrize(("damage", "message"), MODELS.values(), ids=MODELS)
def test_models(tmp_path: Path, profile: Path, damage: Callable[[Path], object], message: str) -> None:
    folder = save_tiny(tmp_path / "m")
    damage(folder)
    found = refused(tmp_path, "compile", folder, "--profile", profile, "--output", tmp_path / "out")
    assert says(found, f"[...]{message}")
    assert found.startswith(str(folder)), "the line says where"


def test_compiling_at_a_layer_without_an_exit(tmp_path: Path, profile: Path) -> None:
    start = ["compile", save_tiny(tmp_path / "m"), "--profile", profile, "--output", tmp_path / "out", "--exit-layers"]
    for asked in ("2", "-1", "3,2"):
        layer = asked.split(",")[-1]
        expected = f"exits: this model has no exit after layer {layer}; it has 1, 3, 4"
        assert refused(tmp_path, *start, asked) == expected
    assert "'--exit-layers': '1,,3': expected whole numbers with commas between" in refused(
        tmp_path, *start, "1,,3", code=2
    )
