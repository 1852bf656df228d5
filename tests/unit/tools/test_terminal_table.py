"""Tables as wide as the terminal: no id and no number is broken over lines."""

from __future__ import annotations

import re

import pytest
from nestforge.tools.terminal_table import print_on_terminal

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
