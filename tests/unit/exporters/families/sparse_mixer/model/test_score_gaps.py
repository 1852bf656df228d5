from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.exporters.families.sparse_mixer.moe import DROPPED, experts_choose, tokens_choose
from nestforge.exporters.families.sparse_mixer.replay import experts_gap, tokens_gap

# Of sixteenths, so that ties are common and every difference is exact.
SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 4))


@st.composite
def drawn_scores(draw: st.DrawFn) -> torch.Tensor:
    groups, tokens, experts = draw(SHAPES)
    numbers = st.lists(st.integers(0, 16), min_size=(n := groups * tokens * experts), max_size=n)
    return torch.tensor(draw(numbers)).reshape(groups, tokens, experts) / 16


@given(drawn_scores(), st.data())
def test_own_routes_have_no_gap(scores: torch.Tensor, data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, scores.shape[1]))
    kept = data.draw(st.integers(1, scores.shape[2]))
    assert experts_gap(scores, experts_choose(scores, slots, kept)).value == 0
    for prioritized in (True, False):
        assert tokens_gap(scores, tokens_choose(scores, slots, prioritized), slots, prioritized).value == 0


@given(drawn_scores(), st.data())
def test_routes_of_rounded_scores_are_within_twice_the_rounding(scores: torch.Tensor, data: st.DataObject) -> None:
    """The gate never refuses an engine that is right but for rounding."""
    slots = data.draw(st.integers(1, scores.shape[1]))
    torch.manual_seed(data.draw(st.integers(0, 100)))
    error = 1 / 16
    rounded = scores + error * (2 * torch.rand(scores.shape) - 1)
    assert experts_gap(scores, experts_choose(rounded, slots, scores.shape[2])).value <= 2 * error
    for prioritized in (True, False):
        found = tokens_choose(rounded, slots, prioritized)
        assert tokens_gap(scores, found, slots, prioritized).value <= 2 * error


@given(drawn_scores(), st.data())
def test_the_gap_of_an_expert_is_its_largest_inversion(scores: torch.Tensor, data: st.DataObject) -> None:
    groups, tokens, experts = scores.shape
    slots = data.draw(st.integers(1, tokens))
    chosen = torch.tensor(
        [[data.draw(st.permutations(range(tokens)))[:slots] for _ in range(experts)] for _ in range(groups)]
    )
    worst = 0.0
    for group in range(groups):
        for expert in range(experts):
            took = chosen[group, expert].tolist()
            left = [token for token in range(tokens) if token not in took]
            pairs = [*combinations(took, 2), *((one, other) for one in took for other in left)]
            by = scores[group, :, expert]
            worst = max([worst, *(float(by[after] - by[before]) for before, after in pairs)])
    assert experts_gap(scores, chosen).value == worst


EXPERTS = torch.tensor([[[0.5, 0.1], [0.4, 0.2], [0.1, 0.9], [0.3, 0.6]]])  # [1, 4, 2]


@pytest.mark.parametrize(
    ("chosen", "value", "where"),
    [
        ([[0, 1], [2, 1]], 0.4, "group 0, expert 1: took token 1 (0.2) before 3 (0.6)"),
        ([[1, 0], [2, 3]], 0.1, "group 0, expert 0: ranked token 1 (0.4) before 0 (0.5)"),
        ([[2, 3], [2, 3]], 0.4, "group 0, expert 0: took token 2 (0.1) before 0 (0.5)"),
    ],
    ids=["another token", "another order", "the best left out"],
)
def test_what_is_said_of_an_expert(chosen: list[list[int]], value: float, where: str) -> None:
    gap = experts_gap(EXPERTS, torch.tensor([chosen]))
    assert math.isclose(gap.value, value, rel_tol=1e-6)
    assert gap.where == where


# Tokens 0, 1 and 3 want expert 0, token 2 wants expert 1; there is one slot each.
TOKENS = torch.tensor([[[0.7, 0.3], [0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]])
FIRST = "group 0, token {} was dropped, its best is expert {}"


@pytest.mark.parametrize(
    ("chosen", "prioritized", "value", "where"),
    [
        ([DROPPED, 0, 1, DROPPED], True, 0.0, None),
        ([0, DROPPED, 1, DROPPED], True, 0.2, FIRST.format(1, "0 (0.9)")),
        ([0, DROPPED, 1, DROPPED], False, 0.0, None),
        ([DROPPED, 0, 1, DROPPED], False, math.inf, FIRST.format(0, "0 (0.7)")),
        ([DROPPED, 0, DROPPED, 1], True, 0.4, FIRST.format(2, "1 (0.8)")),
        ([1, 0, DROPPED, DROPPED], True, 0.5, FIRST.format(2, "1 (0.8)")),
        ([DROPPED, 0, DROPPED, DROPPED], True, 0.6, FIRST.format(2, "1 (0.8)")),
        ([DROPPED, DROPPED, DROPPED, DROPPED], True, math.inf, FIRST.format(0, "0 (0.7)")),
        ([DROPPED, 1, 0, DROPPED], True, 0.8, "group 0, token 1 went to expert 1 (0.1), its best is expert 0 (0.9)"),
    ],
)
def test_what_is_said_of_a_token(chosen: list[int], prioritized: bool, value: float, where: str | None) -> None:
    gap = tokens_gap(TOKENS, torch.tensor([chosen]), 1, prioritized)
    assert gap.value == pytest.approx(value, rel=1e-6)
    if where is not None:
        assert gap.where == where


def test_scores_that_are_no_numbers_are_no_near_tie() -> None:
    scores = EXPERTS.clone()
    scores[0, 2, 1] = math.nan
    assert not experts_gap(scores, torch.tensor([[[0, 1], [2, 3]]])).value <= 1
