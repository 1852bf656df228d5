"""Which record is this host's, and how a new one is put beside those of others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from nestforge import OutputError
from nestforge.bundle.device_files import device_file
from nestforge.bundle.device_files.device_file import (
    MeasuredHost,
    nearest_record,
    record_problems,
    this_host,
    with_record,
)
from nestforge.profiles.probe_host import probe_host


@dataclass(frozen=True)
class Record:
    host: MeasuredHost
    threads: int
    created: str = "2026-11-22T10:00:00+00:00"


BOARD, LAPTOP = (
    MeasuredHost("Cortex-A76", "aarch64", 4, "1.23.0"),
    MeasuredHost("Core", "x86_64", 8, others="NVIDIA L4"),
)


def test_this_host_is_known_by_what_figures_depend_on() -> None:
    facts = probe_host()
    assert this_host() == MeasuredHost(
        " ".join(facts.cpu.split()), facts.architecture, facts.cores, facts.backends["onnxruntime"]
    )


def test_a_host_is_shown_with_what_its_figures_depend_on() -> None:
    assert str(BOARD) == "Cortex-A76, 4 cores, ONNX Runtime 1.23.0"
    assert str(LAPTOP) == "Core, 8 cores, NVIDIA L4"


def test_the_nearest_number_of_threads_of_the_same_host() -> None:
    records = [Record(BOARD, 1), Record(BOARD, 4), Record(LAPTOP, 2)]
    assert nearest_record(records, BOARD, 2) == Record(BOARD, 1)
    assert nearest_record(records, BOARD, 3) == Record(BOARD, 4)
    assert nearest_record(records, LAPTOP, 8) == Record(LAPTOP, 2)
    assert nearest_record(records, replace(BOARD, cores=2), 4) is None


def test_a_record_replaces_its_own_alone() -> None:
    kept = with_record([Record(BOARD, 4), Record(LAPTOP, 2)], Record(BOARD, 4, "later"), Path("file.json"))
    assert kept == (Record(LAPTOP, 2), Record(BOARD, 4, "later"))
    assert with_record(kept, Record(BOARD, 1), Path("file.json"))[1:] == (Record(BOARD, 1), Record(BOARD, 4, "later"))


def test_there_are_not_more_hosts_than_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_file, "_MAX_HOSTS", 1)
    with pytest.raises(OutputError, match=r"file\.json: holds the records of 1 hosts, the most allowed; remove it"):
        with_record([Record(BOARD, 4)], Record(LAPTOP, 4), Path("file.json"))


def test_what_the_types_do_not_say() -> None:
    assert list(record_problems(1, [Record(BOARD, 4), Record(BOARD, 2)])) == []
    long = Record(replace(LAPTOP, others="x" * 201), 4)
    assert list(record_problems(2, [Record(BOARD, 4), long, long])) == [
        "schema_version 2, expected 1",
        "a host with its number of threads stands twice",
        "hosts[1]: a name of more than 200 characters",
        "hosts[2]: a name of more than 200 characters",
    ]
    assert list(record_problems(1, [Record(BOARD, count) for count in range(1, 66)])) == [
        "65 hosts, expected at most 64"
    ]
