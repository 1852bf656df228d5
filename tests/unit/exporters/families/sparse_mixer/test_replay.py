"""Tests."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import ParityError
from nestforge.exporters.families.sparse_mixer.model import SparseMixer
from nestforge.exporters.families.sparse_mixer.moe import DROPPED, experts_choose, tokens_choose
from nestforge.exporters.families.sparse_mixer.replay import experts_gap, replay, tokens_gap
from support.tiny_mixer import mixer_config, tiny_mixer

IDS = torch.randint(1, 24, (2, 16), generator=torch.Generator().manual_seed(1))
INPUTS = (IDS, torch.zeros_like(IDS))
POLICIES: dict[str, dict[str, Any]] = {
    "experts": {"router": "experts_choose"},
    "prioritized": {"router": "tokens_choose"},
    "in turn": {"router": "tokens_choose", "batch_prioritized": False},
}


def model_of(policy: str, **overrides: Any) -> SparseMixer:
    return tiny_mixer(mixer_config(**{"capacity_factor": 0.5, **POLICIES[policy], **overrides}))


def own_routes(model: SparseMixer) -> dict[str, torch.Tensor]:
    return {f"routes.{layer}": routes.own for layer, routes in model.routed(*INPUTS)[1].items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_own_routes_change_nothing(policy: str) -> None:
    model = model_of(policy)
    found = replay(model, INPUTS, own_routes(model))
    for mine, alone in zip(found.outputs, model(*INPUTS), strict=True):
        torch.testing.assert_close(mine, alone, rtol=0, atol=0)
    assert list(found.routes) == ["routes.1", "routes.2"]
    for judged in found.routes.values():
        assert (judged.score_gap, judged.differing) == (0.0, 0)
        # 32 tokens in one group, four experts of 4 slots.
        assert judged.made == (16 if policy == "experts" else 32)


def test_shares_are_those_of_the_given_routes() -> None:
    model = model_of("experts")
    given = own_routes(model)
    given["routes.1"] = torch.arange(4).expand(1, 4, 4).clone()
    judged = replay(model, INPUTS, given).routes["routes.1"]
    scores = model.routed(*INPUTS)[1][1].scores
    assert judged.shares["tokens_dropped"] == 28 / 32
    assert judged.shares["slots_used"] == 1
    assert judged.shares["mean_gate"] == pytest.approx(float(scores[0, :4].mean()), rel=1e-5)

    model = model_of("prioritized")
    given = own_routes(model)
    given["routes.1"] = torch.full((1, 32), -1)
    given["routes.1"][0, 5] = 3
    judged = replay(model, INPUTS, given).routes["routes.1"]
    scores = model.routed(*INPUTS)[1][1].scores
    assert judged.shares == {
        "tokens_dropped": 31 / 32,
        "slots_used": 1 / 16,
        "mean_gate": pytest.approx(float(scores[0, 5, 3]), rel=1e-5),
    }


def test_later_layers_are_judged_behind_the_given_routes() -> None:
    """What a layer decides follows from the routes before it, so those that were given make its own."""
    model = model_of("experts")
    own = own_routes(model)
    given = {**own, "routes.1": own["routes.1"].flip(1).contiguous()}
    found = replay(model, INPUTS, given)
    assert found.routes["routes.1"].score_gap > 0
    assert found.routes["routes.1"].where.startswith("layer 1, group 0, expert ")
    assert found.routes["routes.2"].differing > 0
    with torch.no_grad():
        _, routes = model.routed(*INPUTS, {1: given["routes.1"]})
    given["routes.2"] = routes[2].own
    assert replay(model, INPUTS, given).routes["routes.2"].score_gap == 0


def test_another_order_is_the_same_choice() -> None:
    model = model_of("experts")
    given = own_routes(model)
    given["routes.2"] = given["routes.2"].clone()
    given["routes.2"][0, 1] = given["routes.2"][0, 1].flip(0)
    judged = replay(model, INPUTS, given).routes["routes.2"]
    assert judged.differing == 0
    assert judged.score_gap > 0
    assert judged.where.startswith("layer 2, group 0, expert 1: ranked token ")


def test_equal_scores_make_equal_routes() -> None:
    """Two rows of one text: the same token of the other row is as good."""
    model = model_of("experts", attention_layers=(0, 1, 2, 3), capacity_factor=0.38)  # 3 slots
    ids = IDS[:1].expand(2, -1).contiguous()
    inputs = (ids, torch.zeros_like(ids))
    own = {f"routes.{layer}": routes.own for layer, routes in model.routed(*inputs)[1].items()}
    twins = {name: (routes + 16) % 32 for name, routes in own.items()}  # the same tokens of the other row
    judged = replay(model, inputs, {**own, "routes.1": twins["routes.1"]}).routes["routes.1"]
    assert judged.differing > 0
    assert judged.score_gap <= 1e-6


@pytest.mark.parametrize(
    ("policy", "value", "message"),
    [
        ("experts", 32, "routes.2: expected 0..31, got 32 at [0, 0, 1]"),
        ("experts", -1, "routes.2: expected 0..31, got -1 at [0, 0, 1]"),
        ("experts", None, r"routes.2: group 0, expert 0: took token {first} twice"),
        ("prioritized", 4, "routes.2: expected -1..3, got 4 at [0, 1]"),
        ("prioritized", -2, "routes.2: expected -1..3, got -2 at [0, 1]"),
    ],
)
def test_a_choice_that_cannot_be(policy: str, value: int | None, message: str) -> None:
    model = model_of(policy)
    given = {name: routes.contiguous().clone() for name, routes in own_routes(model).items()}
    first = int(given["routes.2"].flatten()[0])
    given["routes.2"].flatten()[1] = first if value is None else value
    with pytest.raises(ParityError) as error:
        replay(model, INPUTS, given)
    assert str(error.value) == message.format(first=first)


def test_more_tokens_than_slots() -> None:
    model = model_of("prioritized")
    given = own_routes(model)
    given["routes.1"] = torch.zeros(1, 32, dtype=torch.int64)
    with pytest.raises(ParityError) as error:
        replay(model, INPUTS, given)
    assert str(error.value) == "routes.1: group 0, expert 0: took 32 tokens into 4 slots"


@pytest.mark.parametrize(
    ("policy", "given", "message"),
    [
        ("experts", torch.zeros(1, 4, 5, dtype=torch.int64), "expected int64 [1, 4, 4], got int64 [1, 4, 5]"),
        ("experts", torch.zeros(1, 3, 4, dtype=torch.int64), "expected int64 [1, 4, 4], got int64 [1, 3, 4]"),
        ("experts", torch.zeros(1, 4, 4, dtype=torch.int32), "expected int64 [1, 4, 4], got int32 [1, 4, 4]"),
        ("in turn", torch.zeros(2, 16, dtype=torch.int64), "expected int64 [1, 32], got int64 [2, 16]"),
    ],
)
def test_another_count(policy: str, given: torch.Tensor, message: str) -> None:
    model = model_of(policy)
    with pytest.raises(ParityError) as error:
        replay(model, INPUTS, {**own_routes(model), "routes.1": given})
    assert str(error.value) == f"routes.1: {message}"


def test_routes_of_another_model() -> None:
    model = model_of("experts")
    with pytest.raises(ParityError, match=r"routes routes\.1, routes\.3: expected routes\.1, routes\.2"):
        replay(model, INPUTS, {"routes.1": torch.zeros(1), "routes.3": torch.zeros(1)})
    with pytest.raises(ParityError, match=r"routes none: expected routes\.1, routes\.2"):
        replay(model, INPUTS, {})


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
