"""Arguments of public calls: what fits an annotation, and the one line that says what does not."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from nestforge.argument_types import (
    again,
    checked,
    document_fields,
    option,
    options_of,
    positive_limit,
    take_numbers,
    take_types,
    takes_request,
    with_fields_of,
)
from nestforge.errors import InputError, SelectionError


@checked
def call(
    path: str | os.PathLike[str] = "",
    size: float | None = None,
    count: int = 0,
    kind: Literal["a", "b"] = "a",
    levels: Mapping[str, Sequence[float]] | None = None,
    progress: Callable[[str], None] = print,
    flag: bool = False,
    pairs: Mapping[tuple[str, int], float] | None = None,
    **options: Any,
) -> str:
    """Something."""
    return f"{count}{options}"


def test_what_fits_is_taken() -> None:
    assert call(Path("x"), 5, np.int64(3), "b", {"ffn": (0.5, 1)}, len, True, other=object()).startswith("3{")
    assert call(pairs={("a", 1): 0.5}) == "0{}"
    assert (call.__name__, call.__doc__) == ("call", "Something.")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("path", 5, "path: expected str or PathLike, got int 5"),
        ("path", b"x", "path: expected str or PathLike, got bytes b'x'"),
        ("size", "x", "size: expected float or None, got str 'x'"),
        ("count", True, "count: expected int, got bool True"),
        ("count", None, "count: expected int, got None"),
        ("kind", [5], "kind: expected 'a' or 'b', got list [5]"),
        ("levels", {"ffn": "x"}, "levels: expected a mapping of str to a list of float or None, got dict {'ffn': 'x'}"),
        ("progress", 5, "progress: expected a function, got int 5"),
        (
            "pairs",
            {("a", "b"): 1.0},
            "pairs: expected a mapping of a tuple of str, int to float or None, got dict {('a', 'b'): 1.0}",
        ),
        ("flag", np.zeros(2), "flag: expected bool, got ndarray array([0., 0.])"),
    ],
)
def test_what_does_not_is_one_line(name: str, value: object, expected: str) -> None:
    with pytest.raises(InputError) as error:
        call(**{name: value})
    assert str(error.value) == expected


def test_numbers_of_numpy_inside_become_plain_and_nothing_else_is_copied() -> None:
    @dataclass(frozen=True)
    class Request:
        levels: Mapping[str, Sequence[float]] | None = None
        exits: Sequence[int] = ()
        pairs: Mapping[tuple[str, int], float] | None = None

        def __post_init__(self) -> None:
            take_types(self)

    levels = {"ffn": [np.float32(0.5), 1], "heads": [0.5, 1]}
    request = Request(levels, [np.int64(3)], {("a", np.int64(2)): np.float64(1)})
    assert repr((request.levels, request.exits)) == "({'ffn': (0.5, 1), 'heads': [0.5, 1]}, (3,))"
    assert repr(request.pairs) == "{('a', 2): 1.0}"
    plain = {"ffn": [0.5, 1]}
    assert Request(plain).levels is plain


def test_an_argument_that_a_function_lacks_is_one_line() -> None:
    with pytest.raises(InputError, match=r"^no option 'siz'; did you mean 'size'\?$"):
        sized("a", siz=1)


def test_a_call_that_python_itself_refuses_is_one() -> None:
    with pytest.raises(TypeError, match="multiple values"):
        call("x", path="y")


@pytest.mark.parametrize("limit", [2, 2.0, np.float32(2), np.int64(2), Fraction(2)])
def test_a_number_above_0_is_a_limit(limit: object) -> None:
    assert positive_limit("memory_mb", limit) == 2.0


@pytest.mark.parametrize(
    ("limit", "shown"),
    [
        (0, "0"),
        (-1.5, "-1.5"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (10**400, "inf"),
        (True, "True"),
        ("5", "'5'"),
        (None, "None"),
    ],
)
def test_anything_else_is_refused(limit: object, shown: str) -> None:
    with pytest.raises(SelectionError) as error:
        positive_limit("memory_mb", limit)
    assert str(error.value) == f"memory_mb: expected a positive number, got {shown}"


def test_a_method_takes_the_fields_of_its_request() -> None:
    """Each stated once: its arguments, their documentation and their bounds."""

    @document_fields
    @dataclass(frozen=True)
    class Request:
        """A request."""

        name: str
        count: int | None = option("How many.", min=1, max=3)

        def __post_init__(self) -> None:
            take_numbers(self, ["count"])

    class Asked:
        @with_fields_of(Request)
        def __call__(self, request: Request) -> tuple[str, int | None]:
            """Answers."""
            return request.name, request.count

    assert Asked()("a", count=np.int64(2)) == ("a", 2)
    assert Asked()(name="a") == ("a", None)
    assert list(inspect.signature(Asked()).parameters) == ["name", "count"]
    assert Asked.__call__.__doc__ == "Answers.\n\nA request.\n\n``count``: How many."
    with pytest.raises(InputError, match=r"^no option 'cout'; did you mean 'count'\?$"):
        Asked()("a", cout=2)
    with pytest.raises(InputError, match=r"^count: expected a whole number from 1 to 3, got 4$"):
        Asked()("a", 4)


SIZE = option("Size in MB.", 2, min=1, max=3)


@checked
def sized(name: str, size: int = SIZE, *, exact: bool = option("Exactly so.", False), top: int | None = None) -> str:
    """Says it."""
    return f"{name} {size} {exact} {top}"


def test_a_function_states_its_options_as_defaults() -> None:
    """A call has their plain values, help() their text, and a command finds them by name."""
    assert sized("a") == "a 2 False None"
    assert sized("a", 3, exact=True, top=1) == "a 3 True 1"
    assert str(inspect.signature(sized)).startswith("(name: 'str', size: 'int' = 2, *, exact: 'bool' = False, ")
    assert sized.__doc__ == "Says it.\n\n``size``: Size in MB.\n\n``exact``: Exactly so."
    assert list(options_of(sized)) == ["size", "exact"]
    assert options_of(sized)["size"] is SIZE
    with pytest.raises(InputError, match=r"^size: expected a whole number from 1 to 3, got 4$"):
        sized("a", 4)
    with pytest.raises(InputError, match=r"^size: expected int, got float 2.0$"):
        sized("a", 2.0)


def test_an_option_again_is_its_own_but_for_what_is_changed() -> None:
    changed = again(SIZE, default=1, help="Another.")
    assert (changed.default, dict(changed.metadata)) == (1, {"help": "Another.", "min": 1, "max": 3})
    assert (SIZE.default, SIZE.metadata["help"]) == (2, "Size in MB.")


def test_a_function_takes_the_fields_of_its_request() -> None:
    @dataclass(frozen=True)
    class Request:
        """A request
        of two lines."""

        name: str
        count: int = option("Number of times.", 1)

    @takes_request(Request)
    def repeated(request: Request) -> str:
        """Repeats it."""
        return request.name * request.count

    assert (repeated("a"), repeated("a", count=2), list(options_of(Request))) == ("a", "aa", ["name", "count"])
    assert repeated.__doc__ == "Repeats it.\n\nA request\nof two lines."
    with pytest.raises(InputError, match=r"^no option 'cuont'; did you mean 'count'\?$"):
        repeated("a", cuont=2)
