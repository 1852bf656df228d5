"""A generation on the terminal, without a bundle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nestforge.bundle.entries.generation_entry import CachedLayer, GenerationEntry
from nestforge.runtime.generation.row import Generated, GeneratedRow, Run
from nestforge.runtime.summary.short_names import ShortNames
from nestforge.tools.generation_view import say_endless, say_speed

NAMES = ShortNames({"ffn8": "S", "ffn32": "XL"})


def row(*runs: Run) -> Generated:
    tokens = tuple(range(sum(run.tokens for run in runs)))
    return Generated((GeneratedRow("text", tokens, "length", None, runs, None, 3, 0, 1.0, ()),), None)


def test_every_run_has_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    say_speed(row(Run("ffn8", 1, "the smallest"), Run("ffn32", 2, "3 ms left"), Run("ffn8", 4, "1 ms left")), NAMES)
    assert capsys.readouterr().err.splitlines()[1:] == [
        "1 by S: the smallest",
        "2 by XL: 3 ms left",
        "4 by S: 1 ms left",
    ]


def test_of_many_runs_the_last_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [Run("ffn8", 1, f"turn {turn}") if turn % 2 else Run("ffn32", 2, f"turn {turn}") for turn in range(13)]
    say_speed(row(*turns), NAMES)
    lines = capsys.readouterr().err.splitlines()[1:]
    assert lines[:10] == [f"{turn.tokens} by {NAMES(turn.submodel)}: {turn.reason}" for turn in turns[:10]]
    assert lines[10:] == ["4 by XL, 1 by S: in 3 more runs, whose reasons --json shows"]
    say_speed(row(*turns), NAMES, of_a_chat=True)  # whose answers --json is not for
    assert capsys.readouterr().err.splitlines()[-1] == "4 by XL, 1 by S: in 3 more runs"


def test_a_text_that_no_token_ends_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    entry = GenerationEntry(9, (CachedLayer(1, 8),), 16, (), ())
    say_endless(entry, ())
    line = "the model's folder states no token that ends a text: it ends after --max-tokens, or at --stop\n"
    assert capsys.readouterr().err == line
    say_endless(entry, ["end"])
    say_endless(replace(entry, end_ids=(2,)), ())
    say_endless(None, ())
    assert capsys.readouterr().err == ""
