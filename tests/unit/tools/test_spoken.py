"""Settings in the words of who reads: as Python has them from the library, as options from the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from nestforge.errors import NestforgeError
from nestforge.tools import cli
from nestforge.tools.spoken import in_options, options_of

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = ("profiles", "runtime", "exporters", "compiler", "integrations")
# What messages name that is no option: of the library alone, or a field of a file.
PYTHON_ALONE = {"with"}
# Programs of others have options too.
OF_OTHERS = {"compiler/tensorrt/trtexec.py"}


def said(path: Path) -> Iterator[str]:
    """Every text in ``path`` that is no documentation, with ``{}`` where a value stands."""
    tree = ast.parse(path.read_text())
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    no_text = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, holders) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            no_text |= {id(part) for part in ast.walk(node)}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in no_text:
            yield node.value


def texts() -> list[tuple[str, str]]:
    files = [*ROOT.glob("*.py"), *(path for room in LIBRARY for path in (ROOT / room).rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), text) for path in sorted(files) for text in said(path)]


@pytest.fixture(scope="module")
def options() -> dict[str, click.Option]:
    return options_of(click.Context(cli.main))


def test_the_library_names_no_option_outside_of_a_whole_command() -> None:
    naked = re.compile(r"(?<![\w`-])`?--[a-z]")
    found = [
        (file, text)
        for file, text in texts()
        if naked.search(re.sub(r"`[a-z]+ [a-z-]+ [^`]*`", "", text)) and file not in OF_OTHERS
    ]
    assert found == []


def test_every_setting_that_the_library_names_has_an_option(options: dict[str, click.Option]) -> None:
    named = {(file, match[1]) for file, text in texts() for match in re.finditer(r"`([a-z][a-z_]*)(?:=[^`]*)?`", text)}
    assert len(named) > 20
    unknown = {(file, name) for file, name in named if name not in options and name not in PYTHON_ALONE}
    assert unknown == set()


def test_no_setting_of_several_words_stands_outside_of_backquotes(options: dict[str, click.Option]) -> None:
    names = "|".join(name for name in options if "_" in name)
    bare = re.compile(rf"(?<![`\w.])({names})(=(True|False|')| (instead|or pass)\b)")
    assert [(file, text) for file, text in texts() if bare.search(text)] == []


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("shorten it, pass `truncate=True`, or not", "shorten it, pass `--truncate`, or not"),
        ("`include='levels'` builds it", "`--include levels` builds it"),
        ("compile with `measure=False`", "compile with `--no-measure`"),
        ("one with `variants={'moe.combine': 'one_hot'}`", "one with `--variant moe.combine=one_hot`"),
        ("or state other `budgets`", "or state other `--budget`"),
        ("`budget_at=1x600`: larger", "`--budget-at 1x600`: larger"),
        # What a message quotes of a path or a file is no literal of ours.
        ("model `text={[]: 1}`: no such folder", "model `--text {[]: 1}`: no such folder"),
        ("run `nestforge build BUNDLE`, set `nothing=1`", "run `nestforge build BUNDLE`, set `nothing=1`"),
    ],
)
def test_an_error_of_the_library_names_the_option(text: str, spoken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command
    def failing() -> None:
        raise NestforgeError(text)

    known = cli.LazyGroup.get_command
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, c, n: failing if n == "run" else known(self, c, n))
    assert in_options(text) == text  # outside of a command
    assert CliRunner().invoke(cli.main, ["run"]).stderr == f"nestforge: error: {spoken}\n"
