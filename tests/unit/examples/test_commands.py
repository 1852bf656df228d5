from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from nestforge.errors import PlanError
from nestforge.examples.commands import output_option, training


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@click.command()
@output_option("demo/some", "the models")
def train(output: Path) -> None:
    with training(output):
        if output.name == "full":
            raise OSError(28, "No space left on device")
        if output.name == "odd":
            raise PlanError("a width of 0")


@pytest.mark.parametrize(
    ("folder", "line"),
    [("full", "train: error: full: No space left on device\n"), ("odd", "train: error: a width of 0\n")],
)
def test_errors_are_one_line_and_exit_code_1(folder: str, line: str) -> None:
    ended = CliRunner().invoke(train, ["--output", folder])
    assert (ended.exit_code, ended.stderr) == (1, line)


def test_the_folder_and_what_it_holds_are_in_the_help() -> None:
    assert CliRunner().invoke(train, []).exit_code == 0
    help_text = " ".join(CliRunner().invoke(train, ["--help"]).output.split())
    assert "Folder for the models and training.json. What is finished in it is kept. [default: demo/some]" in help_text
