"""What hosts found of drafts: kept by host, sealed, and refused where it is damaged or of another bundle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.device_files.device_file import MeasuredHost, this_host
from nestforge.bundle.manifest import DRAFTS_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleCorruptError, BundleFormatError, OutputError
from nestforge.runtime.generation.draft_calibration import HostDrafts, JudgedDraft, RunTime, keep_drafts, read_drafts
from nestforge.runtime.verify_bytes import verify_bytes
from support.sealing import edit_sealed

GOLDEN = Path(__file__).parents[3] / "golden"
LARGE = "ffn32.cached@b1_64-s1_40"
HERE = HostDrafts(
    this_host(),
    2,
    "2026-11-22T10:00:00+00:00",
    5,
    (RunTime(LARGE, 1, 10.0), RunTime(LARGE, 5, 14.0)),
    (JudgedDraft(LARGE, "n-gram", 3.5, 8.0),),
)
BOARD = replace(HERE, host=MeasuredHost("Cortex-A76", "aarch64", 4, "1.23.0"), threads=4)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(GOLDEN / "bundle-decoder", tmp_path / "lm.bundle"))


def test_each_host_replaces_its_own_figures_alone(bundle: Bundle) -> None:
    assert read_drafts(bundle) is None
    keep_drafts(bundle, BOARD)
    keep_drafts(bundle, HERE)
    later = replace(HERE, created="2026-11-23T10:00:00+00:00")
    assert keep_drafts(bundle, later) == bundle.path / DRAFTS_NAME
    found = read_drafts(bundle)
    assert found is not None
    assert set(found.hosts) == {BOARD, later}
    assert (found.of(HERE.host, 7), found.of(BOARD.host, 4)) == (later, BOARD)
    assert found.of(replace(BOARD.host, cores=2), 4) is None
    assert str(verify_bytes(bundle.path)).endswith(", 2 calibrations of drafts, every hash and seal as written")


def test_there_are_not_more_hosts_than_can_be_read(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestforge.bundle.device_files.device_file._MAX_HOSTS", 1)
    keep_drafts(bundle, HERE)
    with pytest.raises(OutputError, match=r"drafts\.json: holds the records of 1 hosts, the most allowed"):
        keep_drafts(bundle, BOARD)


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda one: one["times"][0].update(engine="other"), "engine 'other' does not generate in this bundle"),
        (lambda one: one["drafts"][0].update(target="other"), "engine 'other' does not generate in this bundle"),
        (lambda one: one["drafts"][0].update(draft="other"), "draft 'other' is no submodel that generates in this"),
        (lambda one: one["drafts"][0].update(accepted=9.0), "draft n-gram: 9.0 accepted of 8.0"),
        (lambda one: one["drafts"][0].update(judged=-1.0), "judged: expected at least 0"),
        (lambda one: one["times"][0].update(tokens=0), "tokens: expected at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(bundle: Bundle, edit: Callable[[Any], object], line: str) -> None:
    keep_drafts(bundle, HERE)
    edit_sealed(bundle.path / DRAFTS_NAME, lambda data: edit(data["hosts"][0]))
    with pytest.raises(BundleFormatError) as refused:
        read_drafts(bundle)
    assert line in str(refused.value)
    assert str(refused.value).endswith("; remove it and run `nestforge calibrate` again")


def test_a_host_stands_there_once(bundle: Bundle) -> None:
    keep_drafts(bundle, HERE)
    edit_sealed(bundle.path / DRAFTS_NAME, lambda data: data["hosts"].append(data["hosts"][0]))
    with pytest.raises(BundleFormatError, match="a host with its number of threads stands twice"):
        read_drafts(bundle)


def test_a_change_behind_the_seal_is_refused(bundle: Bundle) -> None:
    path = keep_drafts(bundle, HERE)
    path.write_text(path.read_text().replace("14.0", "15.0"))
    with pytest.raises(BundleCorruptError, match="its seal is not that of its content"):
        read_drafts(bundle)
    path.write_text(json.dumps({"schema_version": 1}))
    with pytest.raises(BundleCorruptError, match="has no seal at its end"):
        read_drafts(bundle)
