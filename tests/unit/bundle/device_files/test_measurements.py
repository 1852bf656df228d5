"""Measurements of hosts: stored by host, sealed, and refused where it is damaged or of another bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nestforge.bundle.build_record import Noise
from nestforge.bundle.device_files.device_file import MeasuredHost, this_host
from nestforge.bundle.device_files.measurements import (
    HostMeasurement,
    MeasuredEngine,
    MeasuredPoint,
    Measurements,
)
from nestforge.bundle.manifest import MEASUREMENTS_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleCorruptError, BundleFormatError, OutputError
from nestforge.profiles.probe_host import probe_host
from support.sealing import edit_sealed

NOISE = Noise(20, 0.05, 1.01, 0.0)
HERE = HostMeasurement(
    this_host(),
    2,
    "2026-11-22T10:00:00+00:00",
    (MeasuredEngine("ffn16@b1-s8", "packed", (MeasuredPoint(1, 8, 0.5, NOISE, 0.6),)),),
)
BOARD = replace(HERE, host=MeasuredHost("Cortex-A76", "aarch64", 4, "1.23.0"), threads=4)


def test_this_host_is_known_by_what_figures_depend_on() -> None:
    facts = probe_host()
    assert this_host() == MeasuredHost(
        " ".join(facts.cpu.split()), facts.architecture, facts.cores, facts.backends["onnxruntime"]
    )


def test_a_host_is_shown_with_what_its_figures_depend_on() -> None:
    assert str(BOARD.host) == "Cortex-A76, 4 cores, ONNX Runtime 1.23.0"
    assert str(MeasuredHost("Core", "x86_64", 8, others="NVIDIA L4")) == "Core, 8 cores, NVIDIA L4"


@pytest.fixture
def bundle(own_bundle: Path) -> Bundle:
    return open_bundle(own_bundle)


def test_a_bundle_that_nobody_measured_has_none(bundle: Bundle) -> None:
    assert Measurements.read(bundle) is None


def test_each_host_replaces_its_own_figures_alone(bundle: Bundle) -> None:
    Measurements.save(bundle, BOARD)
    Measurements.save(bundle, HERE)
    later = replace(HERE, created="2026-11-23T10:00:00+00:00")
    assert Measurements.save(bundle, later) == bundle.path / MEASUREMENTS_NAME
    with_one = replace(HERE, threads=1)
    Measurements.save(bundle, with_one)
    found = Measurements.read(bundle)
    assert found is not None
    assert set(found.hosts) == {BOARD, later, with_one}
    assert found.of(BOARD.host, 4) == BOARD
    assert (found.of(HERE.host, 1), found.of(HERE.host, 2)) == (with_one, later)
    assert found.of(HERE.host, 7) in (with_one, later), "those of this host before those of the compile"
    assert found.of(replace(BOARD.host, cores=2), 4) is None


def test_there_are_not_more_hosts_than_can_be_read(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestforge.bundle.device_files.device_file._MAX_HOSTS", 1)
    Measurements.save(bundle, HERE)
    Measurements.save(bundle, HERE)
    with pytest.raises(OutputError, match=r"measurements\.json: holds the records of 1 hosts, the most allowed"):
        Measurements.save(bundle, BOARD)


def test_what_cannot_be_written_is_said_and_leaves_what_was_there(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    Measurements.save(bundle, BOARD)
    before = (bundle.path / MEASUREMENTS_NAME).read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match=r"No space left on device.*; the measurement was not saved"):
        Measurements.save(bundle, HERE)
    monkeypatch.undo()
    assert (bundle.path / MEASUREMENTS_NAME).read_bytes() == before
    assert not list(bundle.path.glob(".nestforge-*"))


def first(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["hosts"][0].update(changes)


def engine(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["hosts"][0]["engines"][0].update(changes)


def point(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["hosts"][0]["engines"][0]["points"][0].update(changes)


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another version": (
        lambda data: data.update(schema_version=3),
        "schema_version '3', expected 1; use the nes",
    ),
    "no threads": (first(threads=0), "hosts[0]: threads: expected at least 1, got 0"),
    "a long name": (first(host={"cpu": "x" * 300, "architecture": "y", "cores": 1}), "a name of more than 200 char"),
    "another engine": (engine(engine="ffn8@b1-s8"), "hosts[0]: engine 'ffn8@b1-s8' is not in this bundle"),
    "another residency": (engine(residency="swapped"), "residency: got 'swapped'"),
    "no points": (engine(points=[]), "points of engine ffn16@b1-s8; expected every batch at every sequence once"),
    "a figure below zero": (point(p50_ms=-1), "points[0]: p50_ms: expected at least 0, got -1"),
    "percentiles in the wrong order": (point(p95_ms=0.1), "engine ffn16@b1-s8: p95_ms 0.1 below p50_ms 0.5"),
    "a shape that it does not take": (point(sequence=4), "engine ffn16@b1-s8 does not run at b1-s4"),
    "a shape of huge size": (point(batch=2**40), "does not run at b1099511627776-s8"),
    "an A/A ratio below one": (
        point(noise={"runs": 3, "spread": 0.1, "repeat_ratio": 0.5}),
        "noise: repeat_ratio: expected at least 1, got 0.5",
    ),
    "a share above one": (
        point(noise={"runs": 3, "spread": 0.1, "others_share": 1.5}),
        "noise: others_share: expected at most 1, got 1.5",
    ),
    "no runs": (point(noise={"runs": 0, "spread": 0.1}), "noise: runs: expected at least 1, got 0"),
    "a host twice": (
        lambda data: data["hosts"].append(data["hosts"][0]),
        "a host with its number of threads stands",
    ),
    "too many hosts": (lambda data: data.update(hosts=data["hosts"] * 65), "65 hosts, expected at most 64"),
    "an engine twice": (
        lambda data: data["hosts"][0]["engines"].append(data["hosts"][0]["engines"][0]),
        "hosts[0]: an engine in one residency stands twice",
    ),
}


@pytest.mark.parametrize(("edit", "message"), DAMAGED.values(), ids=DAMAGED)
def test_what_the_format_excludes_is_refused(
    bundle: Bundle, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    Measurements.save(bundle, HERE)
    edit_sealed(bundle.path / MEASUREMENTS_NAME, edit)
    with pytest.raises(BundleFormatError) as error:
        Measurements.read(bundle)
    text = str(error.value)
    assert message in text
    assert text.startswith(str(bundle.path / MEASUREMENTS_NAME))
    assert text.endswith("remove it and run `nestforge measure` again")


def test_beside_a_bundle_without_seals_it_has_one_all_the_same(bundle: Bundle) -> None:
    Measurements.save(bundle, HERE)
    path = bundle.path / MEASUREMENTS_NAME
    data = json.loads(path.read_bytes())
    del data["seal"]
    path.write_text(json.dumps({**data, "schema_version": 2}))
    with pytest.raises(BundleFormatError, match="schema_version '2', expected 1; use the nestforge release"):
        Measurements.read(bundle)


def test_a_changed_byte_and_another_bundles_file_are_refused(bundle: Bundle) -> None:
    Measurements.save(bundle, HERE)
    path = bundle.path / MEASUREMENTS_NAME
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"0.5", b"0.1", 1))
    with pytest.raises(BundleCorruptError, match=r"its seal is not that of its content; remove it and run"):
        Measurements.read(bundle)
    path.write_bytes(raw)
    edit_sealed(path, lambda data: data.update(manifest_sha256="0" * 64))
    with pytest.raises(BundleCorruptError, match="belongs to another manifest than this bundle's; remove it"):
        Measurements.read(bundle)
    path.write_bytes(b" " * (16 * 2**20 + 1))
    with pytest.raises(BundleFormatError, match="16777217 bytes, more than the 16777216 allowed"):
        Measurements.read(bundle)
