"""A request's own checks, before any model or device is opened."""

from __future__ import annotations

from typing import Any

import pytest
from nestforge.argument_types import options_of
from nestforge.errors import InputError
from nestforge.profiles.compile_request import CompileRequest, require_names
from nestforge.profiles.nest_request import ConversionSettings, NestRequest


@pytest.mark.parametrize("name", ["a", "_b.c-9", "x" * 64])
def test_names_of_tasks(name: str) -> None:
    require_names([name], taken=["other"])


@pytest.mark.parametrize("name", ["", ".a", "-a", "a b", "a/b", "x" * 65, "ä"])
def test_names_that_no_task_has(name: str) -> None:
    with pytest.raises(InputError, match="expected a name of at most 64 letters"):
        CompileRequest("model", tasks={name: "folder"})


def test_a_name_that_differs_in_case_alone_is_taken() -> None:
    with pytest.raises(InputError, match="task Both: there is another of this name"):
        require_names(["Both"], taken=["both"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tasks": {"a": "b", "A": "b"}}, "task a: there is another of this name"),
        ({"text": "a.txt", "data": "a.npz"}, "text and data: expected one of them"),
        ({"pairs": ["6:128"], "exits": [6]}, "pairs: they name exit layers and dimensions; leave out `exits` and"),
        ({"lora_rank": 10**9}, "lora_rank: expected a whole number from 1 to 65536, got 1000000000"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CompileRequest("model", **wrong)


@pytest.mark.parametrize("owner", [CompileRequest, NestRequest, ConversionSettings])
def test_help_says_the_meaning_of_every_field(owner: type) -> None:
    for name, field in options_of(owner).items():
        assert f"``{name}``: {field.metadata['help']}" in (owner.__doc__ or "")


def test_pairs_are_layers_and_dimensions() -> None:
    assert CompileRequest("m").layer_dimensions is None
    assert CompileRequest("m", pairs=["6:128", "12:768"]).layer_dimensions == ((6, 128), (12, 768))
    for wrong in ("6", "6:", "6:128:2", "-6:128", "6:1_0"):
        with pytest.raises(InputError, match="pairs: expected layers:dimensions, such as 6:128, got"):
            CompileRequest("m", pairs=[wrong]).layer_dimensions  # noqa: B018
