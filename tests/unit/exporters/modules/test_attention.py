"""Modules that families share: attention, a linear layer with a pair beside it, and the most likely tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import CheckpointError
from nestforge.exporters.modules.attention import additive_mask, causal_mask, rotary
from nestforge.exporters.modules.layers import LowRankLinear, merged, with_pairs
from nestforge.exporters.modules.top_tokens import (
    highest,
    indices_problem,
    ranking_gap,
    repeated_token,
    taken,
    traced_highest,
    worst,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_query_sees_keys_up_to_itself(dtype: torch.dtype) -> None:
    mask = causal_mask(4, torch.zeros(1, dtype=dtype))
    assert mask.dtype == dtype
    assert torch.equal(mask == 0, torch.ones(4, 4).tril().bool())
    assert mask.isfinite().all()
    assert (mask[mask != 0] < -1e38).all()


def test_scores_depend_on_the_distance_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=draw, dtype=torch.float64)

    def score(at: int, other: int) -> torch.Tensor:
        turned, against = (rotary(torch.tensor([place]), 8)(x) for place, x in ((at, query), (other, key)))
        return (turned * against).sum()

    torch.testing.assert_close(score(7, 3), score(5, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(score(0, 0), (query * key).sum(), rtol=0, atol=1e-12)
    assert abs(score(7, 3) - score(7, 2)) > 1e-3


@pytest.mark.parametrize(
    ("dtype", "lowest"),
    [
        (torch.float16, torch.finfo(torch.float16).min),
        (torch.float32, torch.finfo(torch.float32).min),
        (torch.float64, torch.finfo(torch.float32).min),
    ],
)
def test_hidden_keys_have_the_lowest_finite_number(dtype: torch.dtype, lowest: float) -> None:
    mask = additive_mask(torch.tensor([[True, False], [False, False]]), torch.zeros(1, dtype=dtype))
    assert mask.dtype == dtype
    assert mask.tolist() == [[0.0, lowest], [lowest, lowest]]


def test_a_query_that_sees_nothing_gets_the_mean_of_all_values() -> None:
    scores = torch.tensor([[3.0, -40.0, 7.5]])
    hidden = scores + additive_mask(torch.zeros(1, 3, dtype=torch.bool), scores)
    assert hidden.softmax(-1).tolist() == [[pytest.approx(1 / 3)] * 3]


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2, bias=False))


def test_an_empty_pair_changes_no_bit() -> None:
    plain, x = model(), torch.randn(3, 4)
    paired = with_pairs(model(), {"0": 2, "2": 1}, "here")
    assert torch.equal(plain(x), paired(x))
    assert {name for name, _ in paired.named_parameters()} == {
        *("0.weight", "0.bias", "0.lora_A.weight", "0.lora_B.weight"),
        *("2.weight", "2.lora_A.weight", "2.lora_B.weight"),
    }


def test_merging_is_the_same_function_on_the_same_memory() -> None:
    paired, x = with_pairs(model(), {"0": 2}, "here").double(), torch.randn(3, 4).double()
    layer = paired[0]
    assert isinstance(layer, LowRankLinear)
    for pair in (layer.lora_A, layer.lora_B):
        pair.weight.data = torch.randn_like(pair.weight)
    whole = merged(paired)
    assert not any(isinstance(part, LowRankLinear) for part in whole.modules())
    torch.testing.assert_close(whole(x), paired(x), rtol=1e-13, atol=1e-13)
    assert whole[2].weight is paired[2].weight
    assert whole[0].bias is layer.bias


def test_another_layer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="here: 1 is a ReLU, and LoRA is read beside plain linear layers"):
        with_pairs(model(), {"1": 2}, "here")


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
