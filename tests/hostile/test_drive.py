"""The frame of the drivers: whatever an input does to its process has a name, and the next input is tried; the long
run, short: every worker's seeds are counted, and a finding is shown and fails it."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from hostile import drive as frame
from hostile import long_run as module
from hostile.drive import drive
from hostile.long_run import long_run, main
from hostile.misbehaving import KINDS
from hostile.outcomes import Report, Result, merged


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


def test_a_driver_that_does_not_start_is_an_error_and_no_finding() -> None:
    with pytest.raises(RuntimeError, match=r"driver nothing: its worker does not start: (.|\n)*No module named"):
        drive("nothing", [0])


def test_all_workers_seeds_are_one_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds 8, 9, 10, ... of which every eighth is harmless and the next one aborts."""
    monkeypatch.setitem(module.MOST, "misbehaving", 3)
    report = long_run("misbehaving", len(KINDS), 60.0, 2)
    assert report.total == 3
    assert [finding.seed for finding in report.findings] == [len(KINDS) + 1, len(KINDS) + 2]
    assert report.counts == {"misbehaving": {"same": 1, "crashed": 2}}


def test_a_driver_whose_inputs_have_no_effect_any_more_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def driven(driver: str, seeds: Iterable[int], seconds: float, note: Callable[[Result], object]) -> Report:
        for seed in seeds:
            asked.append(seed)
            note(Result(seed, "same" if seed < 3 else "skipped", "a"))
        return Report(driver)

    monkeypatch.setattr(module, "drive", driven)
    monkeypatch.setattr(module, "_WITHOUT_EFFECT", 5)
    long_run("any", 0, 60.0, 1)
    assert asked == list(range(8))


def test_a_finding_fails_the_run_and_is_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "SHARES", {"misbehaving": 1.0})
    monkeypatch.setitem(module.MOST, "misbehaving", 2)
    asked = ["--minutes", "1", "--json", str(tmp_path / "found.json")]
    assert main(asked) == 1
    printed = capsys.readouterr().out
    assert "misbehaving: crashed: abort" in printed
    assert "again: python -m hostile misbehaving --seed 1 --count 1" in printed
    assert "| misbehaving: misbehaving | 2 | 1 | 0 | 0 | 0 | 1 |" in printed
    (driver,) = json.loads((tmp_path / "found.json").read_text())["drivers"]
    assert driver["inputs"] == 2
    monkeypatch.setitem(module.MOST, "misbehaving", 1)
    assert main(["--minutes", "1"]) == 0


def test_reports_are_merged_by_subject() -> None:
    first, second = Report("d", seconds=2.0), Report("d", seconds=1.0)
    first.add(Result(3, "wrong", "a", count=5))
    first.add(Result(4, "same", "a"))
    second.add(Result(1, "hung", "b"))
    whole = merged("d", [first, second])
    assert (whole.total, whole.seconds) == (7, 2.0)
    assert [finding.seed for finding in whole.findings] == [1, 3]
    assert first.named().counts == {"d: a": {"wrong": 5, "same": 1}}
