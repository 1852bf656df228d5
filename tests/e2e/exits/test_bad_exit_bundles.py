"""Bundles with damaged exits, calibrations that are not theirs, and requests that they refuse: one line each."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from click.testing import CliRunner
from nestforge.bundle.manifest import CALIBRATION_NAME, MANIFEST_NAME, SCHEMA_VERSION
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import InputError, SelectionError
from nestforge.tools.cli import main
from support import sealing
from support.exit_bundles import requests, write_arrays, write_exits_bundle, write_exits_manifest
from support.refusals import refused, says

BUDGET = "mean_flops<=3500"


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


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    return lambda raw: sealing.edited(raw, change)


def first(**changes: Any) -> Callable[[bytes], bytes]:
    return edited(lambda data: data["policies"][0].update(changes))


CALIBRATIONS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "not JSON ("),
    "cut off": (lambda raw: raw[: len(raw) // 2], "not JSON ("),
    "binary": (lambda _: bytes(range(256)), "not JSON ("),
    "a list": (lambda _: b"[]", "schema_version 'None', expected 1"),
    "another schema": (edited(lambda data: data.update(schema_version=3)), "schema_version '3', expected 1"),
    "one changed digit": (lambda raw: raw.replace(b'"rows": 20', b'"rows": 21', 1), "its seal is [...] its content"),
    "no seal": (lambda raw: raw[:-80] + b"\n}\n", "has no seal at its end, or was changed since it was sealed"),
    "unknown key": (edited(lambda data: data.update(policy={})), "unknown key 'policy'; did you mean 'policies'?"),
    "no policies": (edited(lambda data: data.pop("policies")), "missing key 'policies'"),
    "a key twice": (
        lambda raw: raw.replace(b'"schema_version"', b'"policies": [], "schema_version"'),
        "not JSON (a key stands twice among defaults, manifest_sha256, policies, policies, schema_version, seal)",
    ),
    "of another bundle": (
        edited(lambda data: data.update(manifest_sha256="0" * 64)),
        "belongs to another manifest than this bundle's",
    ),
    "unknown submodel": (first(submodel="depth3"), "policy 'lean' of 'depth3': no such submodel in this bundle"),
    "too few thresholds": (first(thresholds=[0.3]), "policy 'lean' of 'depth4': 1 thresholds, expected 2"),
    "too many thresholds": (first(thresholds=[0.3, 0.2, 0.1]), "policy 'lean' of 'depth4': 3 thresholds, expected 2"),
    "a threshold that is text": (first(thresholds=["0.3", 0.2]), "policies[0]: [...] expected a number, got str '0.3'"),
    "a threshold that is NaN": (first(thresholds=[float("nan"), 0.2]), "not JSON (NaN is not a JSON number)"),
    "a threshold beyond numbers": (
        lambda raw: sealing.sealed_again(re.sub(rb'("thresholds": \[\s*)[^\s,]+', rb"\g<1>1e999", raw)),
        "policies[0]: thresholds[0]: expected a finite number, got inf",
    ),
    "another comparison": (first(compare=">"), "policies[0]: compare: got '>'; expected one of <, <="),
    "another rule": (first(rule="row"), "policies[0]: rule: got 'row'; did you mean 'per_row'?"),
    "a histogram of fewer exits": (first(histogram=[10, 10]), "policy 'lean' [...] [10, 10], expected counts of 3"),
    "a histogram of nothing": (first(histogram=[0, 0, 0]), "policy 'lean' [...] [0, 0, 0], expected counts of 3"),
    "a histogram below zero": (first(histogram=[-1, 10, 10]), "policies[0]: histogram[0]: expected at least 0, got -1"),
    "a name that means something": (first(name="off"), "policy 'off' of 'depth4': not a name that a policy may have"),
    "a default that is not there": (
        edited(lambda data: data.update(defaults={"depth4": "fast"})),
        "defaults: no policy 'fast' of submodel 'depth4'",
    ),
    "a default of no submodel": (
        edited(lambda data: data.update(defaults={"depth3": "lean"})),
        "defaults: no policy 'lean' of submodel 'depth3'",
    ),
    "a policy twice": (
        edited(lambda data: data["policies"].append(data["policies"][0])),
        "policy 'lean' of 'depth4': stands twice",
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


def drop_engines(data: dict[str, Any], keep: Callable[[dict[str, Any]], bool]) -> None:
    data["engines"] = [engine for engine in data["engines"] if keep(engine)]


def swap_layers(data: dict[str, Any]) -> None:
    segments = data["exits"]["segments"]
    segments[0], segments[1] = segments[1], segments[0]


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no exits": (lambda d: d.pop("exits"), "engine depth2.to1@b1-s8: segment 'to1', but this manifest has no exits"),
    "one segment": (
        lambda d: d["exits"].update(segments=d["exits"]["segments"][-1:]),
        "exits: segments end at layers [4]; expected at least two, rising",
    ),
    "a segment missing": (lambda d: d["exits"]["segments"].pop(1), "exits: segments end at [...] depth has [1, 2, 4]"),
    "segments that fall": (swap_layers, "exits: segments end at layers [2, 1, 4]; expected at least two, rising"),
    "a segment twice": (
        lambda d: d["exits"]["segments"][1].update(name="to1"),
        "exits: segments are named ['to1', 'to1', 'to4']; expected names that differ",
    ),
    "a segment behind the last layer": (
        lambda d: d["exits"]["segments"][2].update(layer=5),
        "exits: segments end at layers [1, 2, 5], axis depth has [1, 2, 4]",
    ),
    "no engines of a segment": (
        lambda d: drop_engines(d, lambda e: e["kind"].get("part") != "to2"),
        "submodel depth2 at b1-s8: has segments, but no to2",
    ),
    "an engine of a segment missing": (
        lambda d: drop_engines(d, lambda e: e["id"] != "depth4.to2@b4-s8"),
        "submodel depth4 at b4-s8: has segments, but no to2",
    ),
    "an engine of an unknown segment": (
        lambda d: d["engines"][1].update(kind={"name": "segment", "part": "to9"}),
        "engine depth2.to1@b1-s8: segment 'to9' is not in this manifest",
    ),
    "a segment without its bytes": (
        lambda d: d["engines"][1].pop("weight_bytes"),
        "engine depth2.to1@b1-s8: a segment without weight_bytes",
    ),
    "engines of one file that differ": (
        lambda d: d["engines"][1].update(flops=7),
        "engine depth4.to1@b1-s8: differs from another engine of its file to1.b1-s8.onnx in more than its",
    ),
    "other classes": (
        lambda d: d["exits"].update(classes=4),
        "outputs are logits float32 [batch, 3], entropy float32 [batch]; expected those of an exit, logits",
    ),
    "one class": (lambda d: d["exits"].update(classes=1), "exits: classes: expected at least 2, got 1"),
    "unknown logits": (
        lambda d: d["exits"].update(logits="scores"),
        "outputs are logits float32 [batch, 3], entropy float32 [batch]; expected those of an exit, scores",
    ),
    "unknown mask": (lambda d: d["exits"].update(mask="mask"), "exits: mask [...] whole numbers [batch, sequence]"),
    "unknown state": (
        lambda d: d["exits"].update(state_out="hidden"),
        "exits: 'hidden' is not an output [batch, sequence, H] of segment to1",
    ),
    "a state of another width": (
        lambda d: d["exits"]["segments"][1]["inputs"][0]["dims"].__setitem__(2, 5),
        "segment to2: inputs are state float32 [batch, sequence, 5], attention_mask int64 [batch, sequence];",
    ),
    "too few thresholds": (
        lambda d: d["exits"]["gate"].update(thresholds=[0.1]),
        "exits: 1 thresholds, expected 2, for all but the last",
    ),
    "another comparison": (lambda d: d["exits"]["gate"].update(compare="="), "exits: gate: [...] did you mean '<='?"),
    "trims that is a number": (lambda d: d["exits"].update(trims=1), "exits: trims: expected true or false, got int 1"),
    "unknown key": (
        lambda d: d["exits"].update(threshold=1),
        "exits: unknown key 'threshold'; expected one of classes, entropy, gate, logits, mask, segments,",
    ),
    "depths that are no exits": (
        lambda d: d["axes"][0].update(choices=[1, 3, 4]),
        "submodel depth2: axis depth: expected one of 1, 3, 4, got 2",
    ),
    "a later schema": (
        lambda d: d.update(schema_version=SCHEMA_VERSION + 1),
        f"schema_version '{SCHEMA_VERSION + 1}', expected {SCHEMA_VERSION}; use [...] or compile again",
    ),
}


@pytest.mark.parametrize(("change", "message"), MANIFESTS.values(), ids=MANIFESTS)
def test_manifests(bundle: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
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


def without_exits(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    whole = tuple(engine for engine in manifest.engines if engine.segment is None)
    write_exits_manifest(bundle, replace(manifest, exits=None, engines=whole))


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        ("0.1,0.2,0.3", "thresholds: expected one number, or 2 (one for every exit but the last), got 3"),
        ("nan", "thresholds: expected numbers in nats, got nan"),
        ("0.1,nan", "thresholds: expected numbers in nats, got nan"),
        (
            "lean",
            "exits 'lean': bundle BUNDLE has no calibration.json; run `nestforge calibrate`, or ask for thresholds",
        ),
        ("", "exits '': bundle BUNDLE has no calibration.json; run `nestforge calibrate`, or ask for thresholds"),
        ("0.1,", "exits '0.1,': bundle BUNDLE has no calibration.json"),
        ("0.1;0.2", "exits '0.1;0.2': bundle BUNDLE has no calibration.json"),
    ],
)
def test_thresholds_requested(bundle: Path, exits: str, message: str) -> None:
    found = refused(bundle, "run", bundle, "--text", "w1 w2", "--exits", exits)
    assert says(found, message.replace("BUNDLE", str(bundle)))


def test_thresholds_of_a_shallow_submodel(bundle: Path) -> None:
    found = refused(bundle, "run", bundle, "--text", "w1 w2", "--submodel", "S", "--exits", "0.1,0.2")
    assert found == "thresholds: expected one number, or 1 (one for every exit but the last), got 2"


def test_exits_of_a_bundle_that_has_none(bundle: Path, tmp_path: Path) -> None:
    without_exits(bundle)
    found = refused(tmp_path, "run", bundle, "--text", "w1", "--exits", "0.1")
    assert found == "exits: this model has no exits to leave at; expected none or 'off', got 0.1"
    arrays = write_arrays(tmp_path / "rows.npz", 20)
    found = refused(tmp_path, "calibrate", bundle, "--data", arrays, "--budget", BUDGET)
    assert found == f"bundle {bundle}: this model has no exits to leave at; nothing to calibrate"


@pytest.mark.parametrize(
    ("lengths", "width", "message"),
    [
        (
            [3] * 9,
            17,
            "input of 9 rows x 17 is larger [...](b1-s8, [...]; shorten it, or compile with a larger",
        ),
        (
            [3],
            17,
            "input of 1 rows x 17 is larger [...](b1-s8, [...]; shorten it, or compile with a larger",
        ),
        ([], 8, "input input_ids: expected int64 [batch, sequence], got shape [0, 8]"),
        ([0], 0, "input input_ids: expected int64 [batch, sequence], got shape [1, 0]"),
    ],
)
@pytest.mark.parametrize("exits", ["off", "0.5"])
def test_shapes(bundle: Path, tmp_path: Path, lengths: list[int], width: int, message: str, exits: str) -> None:
    mask = np.zeros((len(lengths), width), np.int64)
    np.savez(tmp_path / "in.npz", input_ids=mask, attention_mask=mask)
    found = refused(tmp_path, "run", bundle, "--inputs", tmp_path / "in.npz", "--exits", exits)
    assert says(found, message)


def test_a_text_of_too_many_tokens(bundle: Path) -> None:
    found = refused(bundle, "run", bundle, "--text", "w1 " * 17, "--exits", "0.5")
    assert found.startswith("text 0: 17 tokens, the largest bucket takes 16; shorten it, pass `--truncate`, or compile")


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


@pytest.mark.parametrize(
    "asked", [(0.1,), [0.1, 0.2, 0.3], float("nan"), 10**400, True, {}, b"lean", np.ones((2, 2)), (0.1, None)]
)
def test_the_api_refuses_what_is_no_threshold(written: Path, asked: Any) -> None:
    with nestforge.load(written, residency="shared", threads=1) as model, pytest.raises(SelectionError) as error:
        model(requests([3]), exits=asked)
    assert re.match(r"(exits|thresholds): expected [^\n]*$", str(error.value)), str(error.value)


def test_the_api_refuses_rows_beyond_every_bucket(written: Path) -> None:
    with (
        nestforge.load(written, residency="shared", threads=1) as model,
        pytest.raises(InputError, match="input of 1 rows x 17 is larger than every bucket"),
    ):
        model(requests([3], 17), exits=0.5)
