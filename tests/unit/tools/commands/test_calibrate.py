"""``nestforge calibrate`` on a small bundle with exits: what it prints and keeps, and how it refuses."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nestforge.bundle.manifest import CALIBRATION_NAME, DRAFTS_NAME
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.exits.policy import Calibration
from nestforge.runtime.generation.draft_gains import DraftCalibration
from support.commands import error_of, nestforge
from support.exit_bundles import timed_once, write_arrays, write_exits_bundle
from support.processes import DEVICE_PROGRAM

BUDGET = "mean_flops<=3500"


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with timed_once():
        yield


@pytest.fixture(scope="module")
def compiled_exits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exits_bundle(tmp_path_factory.mktemp("bundles") / "exits.bundle")


@pytest.fixture
def bundle(compiled_exits: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled_exits, tmp_path / "own.bundle"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_arrays(tmp_path_factory.mktemp("rows") / "rows.npz", 90)


def test_the_policy_is_printed_and_kept(bundle: Path, rows: Path) -> None:
    result = nestforge("calibrate", bundle, "--data", rows, "--budget", BUDGET)
    assert result.exit_code == 0, result.output
    facts = dict(line.split("  ", 1) for line in result.stdout.split("\n\n")[0].splitlines())
    assert facts["policy"].strip() == f"{BUDGET} (the submodel's default)"
    assert facts["kept in"].strip() == str(bundle / CALIBRATION_NAME)
    table = result.stdout.split("\n\n")[1].splitlines()
    assert [line.split("  ")[0] for line in table] == ["rows", *["calibration"] * 3, *["held out"] * 2]
    kept = Calibration.read(open_bundle(bundle))
    assert kept.defaults == {"depth4": BUDGET}
    (policy,) = kept.policies
    assert table[1].endswith(" ".join(map(str, policy.simulated.histogram)))


def test_a_share_is_printed_with_what_it_came_to(bundle: Path, rows: Path) -> None:
    result = nestforge("calibrate", bundle, "--data", rows, "--budget", "mean_flops<=60 %")
    assert result.exit_code == 0, result.output
    facts = dict(line.split("  ", 1) for line in result.stdout.split("\n\n")[0].splitlines())
    kept = Calibration.read(open_bundle(bundle))
    whole, share = kept.policies[0].whole.costs.mean_flops, kept.policies[0].measured.costs.mean_flops
    shown = f"mean_flops<=60% of the whole engine's: {0.6 * whole:.4g} FLOPs; measured {share / whole:.1%}"
    assert facts["budget"].strip() == shown
    assert kept.defaults == {"depth4": "mean_flops<=60%"}


def test_json_is_the_record(bundle: Path, rows: Path) -> None:
    arguments = ["calibrate", bundle, "--data", rows, "--budget", BUDGET, "--json"]
    options = ["--name", "lean", "--no-default", "--submodel", "S", "--batch", "4", "--rule", "batch_max"]
    result = nestforge(*arguments, *options, "--compare", "<")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["default"] is False
    found = {name: data["policy"][name] for name in ("name", "submodel", "batch", "rule", "compare", "rows")}
    assert found == {"name": "lean", "submodel": "depth2", "batch": 4, "rule": "batch_max", "compare": "<", "rows": 90}
    assert json.loads(Path(data["path"]).read_text())["policies"] == [data["policy"]]
    # Another name is kept beside it, the same one replaces it.
    for name, count in (("lean", 1), ("other", 2)):
        assert nestforge(*arguments, "--name", name, "--submodel", "S").exit_code == 0
        kept = Calibration.read(open_bundle(bundle))
        assert len(kept.policies) == count
        assert kept.defaults == {"depth2": name}


def test_refusals_are_one_line_and_keep_nothing(bundle: Path, rows: Path, tmp_path: Path) -> None:
    start = ["calibrate", bundle, "--data"]
    assert error_of(*start, rows, "--budget", "mean_flop<=1").endswith("did you mean 'mean_flops'?")
    assert error_of(*start, tmp_path / "no.npz", "--budget", BUDGET).endswith("(No such file or directory)")
    assert "out of reach" in error_of(*start, rows, "--budget", "mean_flops<=1")
    assert "batch 9: larger than every bucket" in error_of(*start, rows, "--budget", BUDGET, "--batch", "9")
    assert not (bundle / CALIBRATION_NAME).exists()
    (bundle / CALIBRATION_NAME).write_text("{}")
    assert "schema_version" in error_of(*start, rows, "--budget", BUDGET)


def test_a_device_without_torch_calibrates(bundle: Path, tmp_path: Path) -> None:
    rows = write_arrays(tmp_path / "rows.npz", 12)
    arguments = ["calibrate", str(bundle), "--data", str(rows), "--budget", "mean_flops<=1e9"]
    command = [sys.executable, "-c", DEVICE_PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "full depth meets the budget" in done.stdout


@pytest.fixture
def generating(tmp_path: Path) -> Path:
    golden = Path(__file__).parents[3] / "golden" / "bundle-decoder"
    return Path(shutil.copytree(golden, tmp_path / "lm.bundle"))


def test_drafts_of_a_bundle_that_generates(generating: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the value of the value of\nthe path\n")
    shown = nestforge("calibrate", generating, "--text", texts)
    assert shown.exit_code == 0, shown.output
    assert f"kept in  {generating / DRAFTS_NAME}" in shown.stdout
    assert "checked by" in shown.stdout
    kept = DraftCalibration.read(open_bundle(generating))
    assert kept.hosts[0].texts == 2
    data = json.loads(nestforge("calibrate", generating, "--json").stdout)
    assert data["path"] == str(generating / DRAFTS_NAME)
    assert data["calibration"]["texts"] == 5


def test_what_drafts_are_calibrated_with(generating: Path, bundle: Path, rows: Path) -> None:
    refused = nestforge("calibrate", generating, "--data", rows, "--budget", BUDGET, "--text", rows)
    assert "expected --data with --budget, or of a bundle that generates --text or neither" in refused.stderr
    refused = nestforge("calibrate", bundle)
    assert "expected --data and --budget: this bundle has no engines that generate" in refused.stderr
    refused = nestforge("calibrate", generating, "--data", rows)
    assert refused.exit_code == 2
    for option in (["--batch", 2], ["--no-default"], ["--name", "lean"], ["--rule", "per_row"]):
        refused = nestforge("calibrate", generating, "--submodel", "100%", *option)
        assert refused.exit_code == 2
        assert f"error: {option[0].replace('no-', '')}: for exits; drafts are calibrated with" in refused.stderr
