"""What the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from nestforge.examples.train.matformer import __main__ as command
from nestforge.examples.train.matformer.tasks import DigitsTask, LanguageTask


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, language: LanguageTask, digits: DigitsTask) -> None:
    monkeypatch.setattr(command, "TASKS", (digits, language))
    monkeypatch.setattr(command.os, "cpu_count", lambda: 1)


@pytest.mark.usefixtures("tiny")
def test_the_table_of_both_tasks(tmp_path: Path) -> None:
    result = CliRunner().invoke(command.main, ["--seeds", "2", "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.rpartition(", ")[0] for line in lines if line.startswith(("vit: ", "lm: "))] == [
        "vit: 1,490 parameters",
        "lm: 3,072 parameters",
    ]
    assert [line.split()[0] for line in lines if "±" in line] == ["S", "M", "L", "XL"] * 2
    assert sum(line.startswith("ladder: 3 mixed submodels") for line in lines) == 2
    assert lines[-1] == f"Models, held-out data and training.json lie in {tmp_path / 'out'}"


@pytest.mark.usefixtures("tiny")
def test_models_alone(tmp_path: Path) -> None:
    result = CliRunner().invoke(command.main, ["lm", "--no-baselines", "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "vit" not in result.stdout
    assert "baseline" not in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.endswith("%")]
    assert [row[:2] for row in rows] == [["S", "2"], ["M", "4"], ["L", "8"], ["XL", "16"]]


@pytest.mark.usefixtures("tiny")
def test_no_sources_are_one_line(tmp_path: Path, stdlib: Path) -> None:
    for file in stdlib.iterdir():
        file.unlink()
    result = CliRunner().invoke(command.main, ["lm", "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("train: error: ")
    assert result.stderr.count("\n") == 1
