from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.exporters.modules.top_tokens import (
    highest,
    indices_problem,
    ranking_gap,
    repeated_token,
    taken,
    traced_highest,
    worst,
)

SCORES = torch.tensor([[0.5, 0.4, 0.1, 0.3], [0.1, 0.2, 0.9, 0.6]])


def row(index: tuple[int, ...]) -> str:
    (number,) = index
    return f"row {number}"


def test_equal_scores_fall_to_the_lower_place() -> None:
    tied = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])
    assert highest(tied, 4).tolist() == [[1, 2, 4, 0]]
    assert traced_highest(SCORES, 2).tolist() == highest(SCORES, 2).tolist() == [[0, 1], [2, 3]]


def test_who_is_taken() -> None:
    assert taken(torch.tensor([[0, 3]]), 4).tolist() == [[True, False, False, True]]


@given(st.lists(st.integers(0, 8), min_size=2, max_size=8), st.data())
def test_own_choices_have_no_gap(numbers: list[int], data: st.DataObject) -> None:
    scores = torch.tensor([numbers]) / 8
    count = data.draw(st.integers(1, len(numbers)))
    assert ranking_gap(scores, highest(scores, count), row).value == 0


@pytest.mark.parametrize(
    ("chosen", "value", "where"),
    [
        ([[0, 1], [2, 1]], 0.4, "row 1: took token 1 (0.2) before 3 (0.6)"),
        ([[1, 0], [2, 3]], 0.1, "row 0: ranked token 1 (0.4) before 0 (0.5)"),
    ],
    ids=["another token", "another order"],
)
def test_the_worst_choice_is_named(chosen: list[list[int]], value: float, where: str) -> None:
    gap = ranking_gap(SCORES, torch.tensor(chosen), row)
    assert math.isclose(gap.value, value, rel_tol=1e-6)
    assert gap.where == where


def test_what_is_no_number_is_the_worst() -> None:
    assert worst(torch.tensor([[1.0, math.nan], [2.0, 3.0]])) == (0, 1)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (torch.tensor([[0, 1]]), None),
        (torch.tensor([0, 1]), "expected int64 [1, 2], got int64 [2]"),
        (torch.tensor([[0.0, 1.0]]), "expected int64 [1, 2], got float32 [1, 2]"),
        (torch.tensor([[0, 4]]), "expected 0..3, got 4 at [0, 1]"),
    ],
)
def test_indices_that_cannot_be(given: torch.Tensor, problem: str | None) -> None:
    assert indices_problem(given, (1, 2), 0, 3) == problem


def test_a_token_that_stands_twice() -> None:
    assert repeated_token(torch.tensor([[0, 1], [3, 3]]), row) == "row 1: took token 3 twice"
    assert repeated_token(torch.tensor([[0, 1], [3, 2]]), row) is None
