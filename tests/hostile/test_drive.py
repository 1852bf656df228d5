"""The frame of the drivers: whatever an input does to its process has a name, and the next input is tried."""

from __future__ import annotations

import json

import pytest

from hostile import drive as frame
from hostile.drive import drive
from hostile.misbehaving import KINDS
from hostile.outcomes import Report, Result, described


def test_every_misbehaviour_has_its_outcome_and_the_next_seed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Result] = []

    def next_limit(result: Result) -> None:
        """The usual limit, but for the input that waits it out."""
        results.append(result)
        following = KINDS[len(results) % len(KINDS)]
        monkeypatch.setattr(frame, "HUNG_SECONDS", 1.0 if following == "hang" else usual)

    usual = frame.HUNG_SECONDS
    report = drive("misbehaving", range(len(KINDS)), on_result=next_limit)
    by_kind = dict(zip(KINDS, results, strict=True))
    assert [result.seed for result in results] == list(range(len(KINDS)))
    assert {kind: result.outcome for kind, result in by_kind.items()} == {
        "same": "same",
        "abort": "crashed",
        "bus error": "crashed",
        "exit": "crashed",
        "hang": "hung",
        "memory": "memory",
        "raise": "crashed",
    }
    assert "exit status -6" in by_kind["abort"].message
    assert "time.sleep" in by_kind["hang"].message or "misbehaving.py" in by_kind["hang"].message
    assert "the driver's own defect" in by_kind["raise"].message
    assert [(f.what, f.how) for f in report.findings] == [("misbehaving", kind) for kind in KINDS if kind != "same"]


def test_a_report_counts_and_says_how_to_see_a_finding_again() -> None:
    report = Report("damage")
    for result in (Result(1, "same", "a"), Result(2, "refused", "a"), Result(3, "hung", "b", "cut", "status 9")):
        report.add(result)
    assert report.total == 3
    assert report.findings == [Result(3, "hung", "b", "cut", "status 9")]
    data = json.loads(report.to_json())
    assert data["counts"] == {"a": {"refused": 1, "same": 1}, "b": {"hung": 1}}
    assert data["findings"][0]["seed"] == 3
    header, _, first, second, total = report.table().splitlines()
    assert (
        header
        == "| subject | inputs | refused | same | wrong | escaped | unprintable | crashed | hung | memory | leaked |"
    )
    assert first == "| a | 2 | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |"
    assert second == "| b | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 | 0 |"
    assert total == "| all | 3 | 1 | 1 | 0 | 0 | 0 | 0 | 1 | 0 | 0 |"
    assert "python -m hostile damage --seed 3 --count 1" in described(report.findings, "damage")


def test_a_driver_that_does_not_start_is_an_error_and_no_finding() -> None:
    with pytest.raises(RuntimeError, match=r"driver nothing: its worker does not start: (.|\n)*No module named"):
        drive("nothing", [0])


def test_no_more_inputs_begin_after_the_time_is_up() -> None:
    assert drive("misbehaving", iter(int, 1), seconds=0.0).total <= 1  # seed 0 for ever


def test_a_driver_of_whole_commands_has_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "HUNG_SECONDS", 0.0)
    monkeypatch.setattr(frame, "_LONGER", {"misbehaving": 60.0})
    assert not drive("misbehaving", [0]).findings
