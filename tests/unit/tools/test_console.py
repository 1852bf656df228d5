"""Tables, facts and progress as text."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from math import inf, nan
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import ParityOutput
from nestforge.errors import NestforgeError
from nestforge.progress import Bytes
from nestforge.tables import Table
from nestforge.tools import cli
from nestforge.tools.console import (
    in_options,
    options_of,
    print_facts,
    print_json,
    print_on_terminal,
    print_table,
    say,
    show,
    working,
)


def test_plain_table_aligns_numbers_right_and_text_left(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "ms", "share"], [["a", "1.50", "5 %"], ["longer", "12.25", "-"]])
    assert capsys.readouterr().out == ("name       ms  share\na        1.50    5 %\nlonger  12.25      -\n")


def test_plain_table_without_rows_is_its_header(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "ms"], [])
    assert capsys.readouterr().out == "name  ms\n"


def test_terminal_table_prints_brackets_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(["hint"], [["pip install 'nestforge[cpu]'"]])
    out = capsys.readouterr().out
    assert "pip install 'nestforge[cpu]'" in out
    assert "─" in out


def test_facts_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts([("a", "1"), ("long", "2")])
    assert capsys.readouterr().out == "a     1\nlong  2\n"


def test_parts_of_a_report_are_set_apart_and_those_of_one_part_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    report = [Table.facts([("a", "1")]), [Table(["name"], [["b"]]), "behind it"], "at the end"]
    show(False, {}, lambda: report)
    assert capsys.readouterr().out == "a  1\n\nname\nb\nbehind it\n\nat the end\n"
    show(True, {"all": 1}, lambda: report)
    assert json.loads(capsys.readouterr().out) == {"all": 1}


def test_json_reads_dataclasses_and_is_null_where_a_number_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"bucket": Bucket(1, 128)})
    assert json.loads(capsys.readouterr().out) == {"bucket": {"batch": 1, "sequence": 128}}
    figures = ParityOutput("logits", inf, nan, -1.0, nan, 0.0, 0.0)
    print_json({"outputs": (figures,), "least": -inf})
    assert json.loads(capsys.readouterr().out) == {
        "outputs": [
            {
                "name": "logits",
                "max_abs": None,
                "max_rel": None,
                "min_cosine": -1.0,
                "max_rms": None,
                "float32_max_abs": 0.0,
                "float32_rms": 0.0,
            }
        ],
        "least": None,
    }


def test_a_long_job_keeps_stdout_clean_and_reports_each_stage_once(capsys: pytest.CaptureFixture[str]) -> None:
    with working() as progress:
        print("a library talks")
        progress("trace", 0, 1)
        progress("trace", 1, 2)
        progress("trace", 1, 1)
        progress("trace", 1, 1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "a library talks\ntrace: 2/2\n"


def test_a_log_says_where_a_long_stage_is_and_how_long_it_still_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with working() as progress:
        for seconds, stage, done, total in [
            (0, "store", 0, 1),
            (31, "store", Bytes(10**9), Bytes(4 * 10**9)),
            (60, "store", Bytes(2 * 10**9), Bytes(4 * 10**9)),  # half a minute later at the earliest
            (62, "store", 1, 1),
            (62, "build", 0, 2),
            (93, "build", 0.08, 2),  # too little to judge by
            (124, "build", 0.5, 2),
            (155, "build", 0.25, 2),  # a further pass of the same part
            (160, "build", 1, 1),
        ]:
            now[0] = seconds
            progress(stage, done, total)
    assert capsys.readouterr().err.splitlines() == [
        "store: 25% (1,000.0/4,000.0 MB), about 93 s left",
        "store: 4,000.0/4,000.0 MB",
        "build: 4% (0/2)",
        "build: 25% (0/2), about 186 s left",
        "build: 25% (0/2), about 279 s left",
        "build: 2/2",
    ]


OUTSIDE = "a\nfake: line\x1b[2J\ud800\u202e"
ESCAPED = r"a\nfake: line\x1b[2J\ud800\u202e"


def test_outside_text_reaches_the_terminal_as_one_printable_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(f"\nnote: {OUTSIDE}\n")
    assert capsys.readouterr().out == f"\nnote: {ESCAPED}\n\n"
    say("", err=True)
    assert capsys.readouterr().err == "\n"
    print_facts([(OUTSIDE, "1")])
    print_table([OUTSIDE], [[OUTSIDE]])
    assert capsys.readouterr().out == f"{ESCAPED}  1\n{ESCAPED}\n{ESCAPED}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(["name"], [[OUTSIDE]])
    assert ESCAPED in capsys.readouterr().out


def test_outside_text_in_json_is_escaped_and_reads_back_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"name": OUTSIDE + "\x9b\U000e0041é", OUTSIDE: [1]}
    print_json(given)
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    assert "é" in out
    assert json.loads(out) == given


def test_on_a_terminal_a_stage_says_how_long_it_still_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    with working() as progress:
        progress("build", 0, 4)
        progress("build", 4, 4)
        progress("store", Bytes(10**6), Bytes(2 * 10**6))
    drawn = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"build .* 4/4 +\d:\d\d:\d\d left \d:\d\d:\d\d", drawn)
    assert re.search(r"store .* 1\.0/2\.0 MB +\d:\d\d:\d\d left", drawn)


IDS = [f"ffn{128 * n}x3_1536x3-heads{n}x3_12x3" for n in (1, 2, 3)]
COLUMNS = ["submodel", *(f"measured ms at 1x{n}" for n in range(8)), "budgets", "id"]
ROWS = [["S+1", *["0.6331 ±0.0056"] * 8, "fast, tiny", name] for name in IDS]


def drawn(capsys: pytest.CaptureFixture[str], width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    print_on_terminal(COLUMNS, ROWS, [False] * len(COLUMNS), ())
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
def test_columns_that_do_not_fit_follow_in_another_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    out = drawn(capsys, width, monkeypatch)
    assert max(map(len, out.splitlines())) <= width
    assert all(f" {name} " in out for name in IDS)
    assert out.count("0.6331 ±0.0056") == 3 * 8
    tables = out.count("┏")
    assert tables > 1
    assert out.count(" S+1 ") == 3 * tables, "the first column stands in each"


def test_texts_break_between_words_and_what_is_wider_than_the_terminal_folds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    print_on_terminal(
        ["backend", "remark"], [["tensorrt", "is not installed; " * 6], ["x", "y" * 100]], [False] * 2, ()
    )
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    assert out.count("y") == 100
    assert "installed" in out


def test_what_was_chosen_and_what_is_noisy_has_a_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_on_terminal(["submodel", "ms", "fast"], [["S", "1.0 noisy", "chosen"], ["M", "2.0", "no"]], [False] * 3, [1])
    out = capsys.readouterr().out
    assert re.search("\x1b\\[33m1.0 noisy", out)
    assert re.search("\x1b\\[1;32mchosen", out)
    assert re.search("\x1b\\[1;32mM", out)
    assert not re.search("\x1b\\[[0-9;]+m(S|2.0|no) ", out)


ROOT = Path(__file__).resolve().parents[3]
LIBRARY = ("profiles", "runtime", "exporters", "compiler", "integrations")
# Names in messages that are no options: of the library alone, or a field of a file.
PYTHON_ALONE = {"with"}


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


@cache
def texts() -> list[tuple[str, str]]:
    files = [*ROOT.glob("*.py"), *(path for room in LIBRARY for path in (ROOT / room).rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), text) for path in sorted(files) for text in said(path)]


@pytest.fixture(scope="module")
def options() -> dict[str, click.Option]:
    return options_of(click.Context(cli.main))


def test_the_library_names_no_option_outside_of_a_whole_command() -> None:
    naked = re.compile(r"(?<![\w`-])`?--[a-z]")
    found = [(file, text) for file, text in texts() if naked.search(re.sub(r"`[a-z]+ [a-z-]+ [^`]*`", "", text))]
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
        ("ask with `truncate=False`, `budget=None`", "ask with no `--truncate`, no `--budget`"),
        ("one with `variants={'moe.combine': 'one_hot'}`", "one with `--variant moe.combine=one_hot`"),
        ("or state other `budgets`", "or state other `--budget`"),
        ("`budget_at=1x600`: larger", "`--budget-at 1x600`: larger"),
        # Quotes of a path or a file are no literals of ours.
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
