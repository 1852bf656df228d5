"""Tables, facts and progress as text."""

from __future__ import annotations

import json
import re
import sys
from math import inf, nan

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.entries.engine_entry import ParityOutput
from nestforge.tools.console import print_facts, print_json, print_table, say, working


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
    drawn = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"build .* 4/4 +\d:\d\d:\d\d left \d:\d\d:\d\d", drawn)
