from __future__ import annotations

from typing import Any

import pytest
from nestforge.runtime.generation import template_allowance as module
from nestforge.runtime.generation.template_allowance import (
    MOST_LETTERS,
    Allowance,
    letters_of,
    require_formatted,
    require_numbers,
    require_operation,
    require_replaced,
)


def test_a_list_counts_what_it_holds_as_often_as_it_is_there() -> None:
    doubled: list[Any] = ["ab"]
    for _ in range(60):
        doubled = [doubled, doubled]
    assert letters_of("abc") == 3
    assert letters_of(["abc", ("d",), {"e": 5}]) == (16 + 3) + (16 + 16 + 1) + (16 + 16 + 1 + 16 + 1)
    assert letters_of(doubled) > 2**60  # in sixty steps
    with pytest.raises(ValueError, match="a number of more than 4096 bits"):
        letters_of([2**4096])


def test_values_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LETTERS_IN_ALL", 10)
    allowed = Allowance()
    assert list(allowed.each(["abc", "def", "ghi"])) == ["abc", "def", "ghi"]
    with pytest.raises(ValueError, match=r"^it makes more than 10 letters in all$"):
        allowed.made("jk")


def test_time_is_that_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Allowance().step()
    monkeypatch.setattr(module, "MOST_SECONDS", -1.0)
    with pytest.raises(ValueError, match=r"^it takes more than -1 s of the processor$"):
        Allowance().step()


@pytest.mark.parametrize(
    ("text", "mark", "values", "fits"),
    [
        ("%s and %5d%%, 123456789", "%", ["a" * 1000, 7], True),
        ("%0000000009999999d", "%", [7], False),
        ("%s%s", "%", ["a" * (MOST_LETTERS // 2), "b"], False),
        ("%*d", "%", [(9, 7)], False),
        ("**%s**", "%", ["a"], True),
        ('{{"a": {}}} in 123456789', "{", ["b"], True),
        ("{:9999999}", "{", ["b"], False),
        ("{a:{b}}", "{", ["b", "9999999"], False),
        ("{" + ":" * 200_000, "{", [], True),
        ("%" + "0" * 200_000, "%", [], True),
        ("{0}" * 100_000, "{", ["a" * 100], False),
    ],
    ids=lambda value: str(value)[:20],
)
def test_formats(text: str, mark: str, values: list[object], fits: bool) -> None:
    if fits:
        require_formatted(text, mark, values)
    else:
        with pytest.raises(ValueError, match=r"^it (makes a value of \d+ letters|formats by a width that is a value)"):
            require_formatted(text, mark, values)


def test_what_is_about_to_be_made() -> None:
    require_operation("*", "a", MOST_LETTERS)
    require_operation("*", 3.5, 10**9)
    require_operation("**", 2, 2048)
    require_operation("**", 0.5, 10**9)
    require_replaced("aba", "a", "b" * (MOST_LETTERS // 2 - 2))
    require_numbers([MOST_LETTERS, "a", None, 1e300])
    for operator, left, right in (
        ("*", "ab", MOST_LETTERS),
        ("*", 10**9, ["a"]),
        ("**", 2, 2049),
        ("%", "%9999999d", 1),
    ):
        with pytest.raises(ValueError, match=r"^it makes a "):
            require_operation(operator, left, right)
    with pytest.raises(ValueError, match=r"^it makes a value of \d+ letters"):
        require_replaced("aba", "", "b" * MOST_LETTERS)
    with pytest.raises(ValueError, match=r"^it asks for 1e\+09 of something, more than 4194304$"):
        require_numbers([1, 10**9])
