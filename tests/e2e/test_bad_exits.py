"""Models, bundles, calibrations and data with exits that commands refuse: one line each, nothing written.

What may be wrong of each is in the tables of unit tests; here one of a kind goes all the way.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from nestforge.bundle.manifest import CALIBRATION_NAME, MANIFEST_NAME
from nestforge.tools.cli import main
from support import sealing
from support.exit_bundles import (
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


CALIBRATIONS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda raw: raw[: len(raw) // 2], "not JSON ("),
    "one changed digit": (lambda raw: raw.replace(b'"rows": 20', b'"rows": 21', 1), "its seal is [...] its content"),
    "a threshold beyond numbers": (
        lambda raw: sealing.sealed_again(re.sub(rb'("thresholds": \[\s*)[^\s,]+', rb"\g<1>1e999", raw)),
        "policies[0]: thresholds[0]: expected a finite number, got inf",
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


def test_a_manifest_that_lacks_a_segment(bundle: Path, tmp_path: Path) -> None:
    data = json.loads((bundle / MANIFEST_NAME).read_text())
    data["exits"]["segments"].pop(1)
    write_exits_manifest(bundle, data)
    rows = write_arrays(tmp_path / "rows.npz", 20)
    for arguments in (
        ("run", bundle, "--text", "w1"),
        ("inspect", bundle),
        ("verify", bundle),
        ("calibrate", bundle, "--data", rows, "--budget", BUDGET),
    ):
        found = refused(tmp_path, *arguments)
        assert says(found, f"{bundle / MANIFEST_NAME}: exits: segments end at [...] depth has [1, 2, 4]")


def test_a_segment_of_another_interface_under_the_same_name(tmp_path: Path) -> None:
    """Under new hashes: what is found when the engine is opened."""
    bundle = write_exits_bundle(tmp_path / "b")
    shutil.copy(bundle / "to4.b1-s8.onnx", bundle / "to2.b1-s8.onnx")
    sealing.reseal(bundle)
    np.savez(tmp_path / "in.npz", **requests([3]))
    found = refused(tmp_path, "run", bundle, "--inputs", tmp_path / "in.npz", "--exits", "-1")
    assert found.startswith("engine depth4.to2@b1-s8: outputs are ")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--batch", "0", "0 is not in the range x>=1"),
        ("--rule", "alone", "'alone' is not one of 'per_row', 'batch_max'"),
    ],
)
def test_options(bundle: Path, tmp_path: Path, option: str, value: str, message: str) -> None:
    rows = write_arrays(tmp_path / "rows.npz", 20)
    found = refused(tmp_path, "calibrate", bundle, "--data", rows, "--budget", BUDGET, option, value, code=2)
    assert f"'{option}': {message}; see" in found


@needs_root
def test_a_bundle_that_cannot_be_written(bundle: Path, tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "rows.npz", 20)
    with nobody(bundle, path.parent):
        found = refused(tmp_path, "calibrate", bundle, "--data", path, "--budget", BUDGET)
    assert found == f"{bundle}: cannot be written, so a calibration could not be saved; make it writable"
