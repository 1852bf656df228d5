"""``nestforge nest`` on a tiny model: what it prints, how it refuses, how it stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from nestforge.compiler.nest import nest as nest_module
from nestforge.tools.cli import main
from support.tiny_models import add_pooling, corpus, save_tiny_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nest")
    add_pooling(save_tiny_encoder(folder / "tiny"))
    corpus(folder / "corpus.txt")
    return folder


def nestforge(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def nested(folder: Path, output: Path, *more: str) -> Result:
    return nestforge("nest", folder / "tiny", "--text", folder / "corpus.txt", "--output", output, *more)


def test_a_table_of_levels_and_what_was_done(folder: Path, tmp_path: Path) -> None:
    result = nested(folder, tmp_path / "out", "--steps", "3", "--levels", "ffn=0.5,1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split("  ")[0] == "submodel"
    assert [line.split()[0] for line in lines[1:3]] == ["50%", "100%"]
    assert [line.split() for line in lines[4:7]] == [
        ["submodel", "id"],
        ["50%", "ffn32-heads4"],
        ["100%", "ffn64-heads4"],
    ]
    assert lines[-1] == f"wrote {tmp_path / 'out'}"
    assert "trained on  319 texts, 3 steps, " in result.stdout
    assert "distill: 3/3" in result.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_json_has_every_figure_and_stdout_nothing_else(folder: Path, tmp_path: Path) -> None:
    result = nested(folder, tmp_path / "out", "--steps", "2", "--seed", "7", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert set(data) == {"output", "levels", "texts", "held_out", "steps", "seconds", "seed"}
    assert (data["output"], data["steps"], data["seed"]) == (str(tmp_path / "out"), 2, 7)
    assert set(data["levels"][0]) == {"label", "submodel", "fractions", "parameters", "ranked", "nested"}
    assert [level["fractions"] for level in data["levels"]] == [{"ffn": f} for f in (0.25, 0.5, 0.75, 1.0)]


def test_what_the_user_can_mend_is_one_line(folder: Path, tmp_path: Path) -> None:
    result = nested(folder, tmp_path / "out", "--levels", "depth=0.5,1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "nestforge: error: levels: this model has no axis kind 'depth'; expected one of ffn, heads\n"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "3", "--minutes", "1"], "--minutes and --steps: give one of them"),
        (["--steps", "0"], "'--steps': 0 is not in the range x>=1"),
        (["--minutes", "0"], "'--minutes': 0.0 is not in the range x>0"),
        (["--levels", "half"], "'--levels': 'half': expected an axis kind and fractions"),
    ],
)
def test_wrong_usage(options: list[str], says: str, folder: Path, tmp_path: Path) -> None:
    result = nested(folder, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert says in result.stderr


def test_an_interruption_says_how_to_go_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nest_module, "distill", stopped)
    result = nested(folder, tmp_path / "out")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.splitlines()[-1] == "nestforge: interrupted: the same command goes on where this one was"
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
