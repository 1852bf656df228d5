"""The long run, short: every worker's seeds are counted, and a finding is shown and fails it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from hostile import long_run as module
from hostile.long_run import long_run, main
from hostile.misbehaving import KINDS
from hostile.outcomes import Report, Result, merged


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


def test_every_driver_of_the_run_is_a_module_here() -> None:
    assert sum(module.SHARES.values()) == pytest.approx(1.0)
    for driver in module.SHARES:
        assert (Path(module.__file__).parent / driver).is_dir() or Path(module.__file__).with_name(
            f"{driver}.py"
        ).exists()


def test_reports_are_merged_by_subject() -> None:
    first, second = Report("d", seconds=2.0), Report("d", seconds=1.0)
    first.add(Result(3, "wrong", "a", count=5))
    first.add(Result(4, "same", "a"))
    second.add(Result(1, "hung", "b"))
    whole = merged("d", [first, second])
    assert (whole.total, whole.seconds) == (7, 2.0)
    assert [finding.seed for finding in whole.findings] == [1, 3]
    assert first.named().counts == {"d: a": {"wrong": 5, "same": 1}}
