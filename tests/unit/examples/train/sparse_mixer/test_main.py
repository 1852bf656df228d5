"""What the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from nestforge.examples.train.sparse_mixer import __main__ as command
from nestforge.examples.train.sparse_mixer.recipe import Subject
from nestforge.examples.train.sparse_mixer.runs import Trainer


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch, subjects: dict[str, Subject], trainer: Trainer) -> None:
    monkeypatch.setattr(command, "MODELS", subjects)
    monkeypatch.setattr(command, "TRAINER", trainer)
    monkeypatch.setattr(command.os, "cpu_count", lambda: 1)


@pytest.mark.usefixtures("_tiny")
def test_the_table_of_all_models_and_budgets(tmp_path: Path) -> None:
    result = CliRunner().invoke(command.main, ["--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("8 test rows; the commonest byte: ")
    assert [line.partition(":")[0] for line in lines if " parameters, trained in " in line] == [
        *("experts", "tokens", "peer", "experts seed 1")
    ]
    assert sum("% of 64 tokens" in line for line in lines) == 6
    assert sum(line.endswith(" -") for line in lines) == 1  # the peer drops no tokens
    assert lines[-1] == f"Models, held-out rows and training.json lie in {tmp_path / 'out'}"


@pytest.mark.usefixtures("_tiny")
def test_no_sources_are_one_line(tmp_path: Path, stdlib: Path) -> None:
    for file in stdlib.iterdir():
        file.unlink()
    result = CliRunner().invoke(command.main, ["--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("train: error: ")
    assert result.stderr.count("\n") == 1
