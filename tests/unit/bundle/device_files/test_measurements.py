"""Lists of plans, of tasks and of measurements: read, sealed, and refused where damaged or of another bundle."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nestforge import whole_file
from nestforge.bundle.build_record import Noise
from nestforge.bundle.device_files.device_file import MeasuredHost, this_host
from nestforge.bundle.device_files.measurements import HostMeasurement, MeasuredEngine, MeasuredPoint, Measurements
from nestforge.bundle.device_files.plan_index import Gpu, PlanEntry, PlanParity, read_plan
from nestforge.bundle.device_files.task_index import read_tasks, save_task_entry, task_file
from nestforge.bundle.manifest import MEASUREMENTS_NAME
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleCorruptError, BundleFormatError, OutputError
from nestforge.profiles.device_profile import TensorRTOptions
from nestforge.profiles.probe_host import probe_host
from support.processes import needs_root, nobody
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


PLAN = b"a plan"
ENTRY = PlanEntry(
    graph="ffn16.b1-s8.onnx",
    file="x.plan",
    bytes=len(PLAN),
    sha256=hashlib.sha256(PLAN).hexdigest(),
    key="",
    gpu=Gpu("Fake GPU", "8.7", "10.3.0"),
    options=TensorRTOptions(),
    activation_bytes=0,
    seconds=0.0,
    layers={},
    parity=PlanParity("the graph", "exact", 1, 0.0, 1.0),
)


def sparse(path: Path) -> None:
    """64 GiB that take no place on the disk."""
    path.touch()
    os.truncate(path, 2**36)


def link(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(PLAN)
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "missing, or no regular file"),
        (Path.mkdir, "missing, or no regular file"),
        (link, "missing, or no regular file"),
        (lambda path: None, "missing, or no regular file"),
        (sparse, "68719476736 bytes, plans.json expects 6"),
        (lambda path: path.write_bytes(PLAN + b"x"), "7 bytes, plans.json expects 6"),
        (lambda path: path.write_bytes(b"A plan"), "sha256 .* expects"),
    ],
    ids=["pipe", "folder", "link", "missing", "huge", "longer", "changed"],
)
def test_what_is_not_the_plan_is_refused_and_not_waited_for(
    own_bundle: Path, make: Callable[[Path], object], message: str
) -> None:
    bundle = open_bundle(own_bundle)
    make(own_bundle / ENTRY.file)
    with pytest.raises(BundleCorruptError, match=rf"x\.plan: {message}.*; remove it and run `nestforge build BUNDLE`"):
        read_plan(bundle, ENTRY)


def test_a_plan_is_read_as_it_was_built(own_bundle: Path) -> None:
    (own_bundle / ENTRY.file).write_bytes(PLAN)
    assert read_plan(open_bundle(own_bundle), ENTRY) == PLAN


GOLDEN = Path(__file__).parents[3] / "golden" / "bundle-tasks"


@pytest.mark.parametrize(("stopped_at", "is_listed"), [(1, False), (2, True)])
def test_an_interrupt_leaves_the_file_of_a_listed_task_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: int, is_listed: bool
) -> None:
    """The names of the task's file and of the list are there before each waits for the disk."""
    bundle = open_bundle(shutil.copytree(GOLDEN, tmp_path / "b"))
    before = read_tasks(bundle)
    data = (bundle.path / before[0].file).read_bytes()
    task = replace(before[0], name="new", file=task_file("new", data))
    calls, sync = [], whole_file.sync_folder

    def stopped(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == stopped_at:
            raise KeyboardInterrupt
        sync(folder)

    monkeypatch.setattr(whole_file, "sync_folder", stopped)
    with pytest.raises(KeyboardInterrupt):
        save_task_entry(bundle, task, data)
    assert (task.name in {one.name for one in read_tasks(bundle)}) is is_listed
    assert (bundle.path / task.file).exists() is is_listed


@needs_root
def test_a_read_only_file_system_is_one_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a system refuses to remove even a file that is not there."""
    bundle = open_bundle(shutil.copytree(GOLDEN, tmp_path / "b"))
    one = read_tasks(bundle)[0]
    data = (bundle.path / one.file).read_bytes()

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    with nobody(bundle.path), pytest.raises(OutputError, match="task new was not saved"):
        save_task_entry(bundle, replace(one, name="new", file=task_file("new", data)), data)
