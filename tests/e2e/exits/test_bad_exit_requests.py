"""Requests that a bundle with exits refuses, one line each."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from nestforge.bundle.open_bundle import open_bundle
from nestforge.errors import InputError, SelectionError
from support.exit_bundles import requests, write_arrays, write_exits_manifest
from support.refusals import refused

BUDGET = "mean_flops<=3500"


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
        ("lean", "exits 'lean': bundle BUNDLE has no calibration.json; run `nestforge calibrate`, or ask for thr"),
        ("", "exits '': bundle BUNDLE has no calibration.json; run `nestforge calibrate`, or ask for thresholds"),
        ("0.1,", "exits '0.1,': bundle BUNDLE has no calibration.json"),
        ("0.1;0.2", "exits '0.1;0.2': bundle BUNDLE has no calibration.json"),
    ],
)
def test_thresholds_asked_for(bundle: Path, exits: str, message: str) -> None:
    found = refused(bundle, "run", bundle, "--text", "w1 w2", "--exits", exits)
    assert found.startswith(message.replace("BUNDLE", str(bundle)))


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
        ([3] * 9, 17, "input of 9 rows x 17 is larger than every bucket of this bundle (b1-s8, b1-s16, b4-s8"),
        ([3], 17, "input of 1 rows x 17 is larger than every bucket of this bundle (b1-s8, b1-s16, b4-s8"),
        ([], 8, "input input_ids: expected int64 [batch, sequence], got shape [0, 8]"),
        ([0], 0, "input input_ids: expected int64 [batch, sequence], got shape [1, 0]"),
    ],
)
@pytest.mark.parametrize("exits", ["off", "0.5"])
def test_shapes(bundle: Path, tmp_path: Path, lengths: list[int], width: int, message: str, exits: str) -> None:
    mask = np.zeros((len(lengths), width), np.int64)
    np.savez(tmp_path / "in.npz", input_ids=mask, attention_mask=mask)
    found = refused(tmp_path, "run", bundle, "--inputs", tmp_path / "in.npz", "--exits", exits)
    assert found.startswith(message)


def test_a_text_of_too_many_tokens(bundle: Path) -> None:
    found = refused(bundle, "run", bundle, "--text", "w1 " * 17, "--exits", "0.5")
    assert found.startswith("text 0: 17 tokens, the largest bucket takes 16; shorten it, pass")


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
