"""Tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.errors import PlanError
from nestforge.exporters.families.sparse_mixer.moe import (
    DROPPED,
    MoE,
    Router,
    experts_choose,
    first_choice,
    gates_of,
    tokens_choose,
)
from support import mixer_reference
from support.tiny_mixer import mixer_config, tiny_mixer


def _moe(**settings_: Any) -> MoE:
    """The first experts of the tiny model, in float64."""
    part: MoE = tiny_mixer(mixer_config(**settings_)).layers[1].moe.double()
    return part


def _weights(part: MoE) -> dict[str, np.ndarray[Any, Any]]:
    return {f"moe.{name}": value.numpy() for name, value in part.named_parameters()}


def _hidden(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_tokens_of_no_one_and_several_experts() -> None:
    """Token 0 is computed by expert 0 alone, 1 by experts 0 and 1, 2 by all four, 9 by none."""
    part = _moe()
    x = _hidden(1)
    taken = torch.tensor([[[0, 1, 2, 3], [1, 2, 4, 5], [2, 6, 7, 8], [2, 10, 11, 12]]])
    answer, routes = part(x, taken)
    assert torch.equal(routes.chosen, taken)
    p, u = _weights(part), x[0].numpy()
    term = [
        [mixer_reference.expert_ffn(p, "moe", e, u[t]) * routes.scores[0, t, e].item() for e in range(4)]
        for t in range(16)
    ]
    np.testing.assert_allclose(answer[0, 0], term[0][0], atol=1e-12)
    np.testing.assert_allclose(answer[0, 1], term[1][0] + term[1][1], atol=1e-12)
    np.testing.assert_allclose(answer[0, 2], sum(term[2]), atol=1e-12)
    for unseen in (9, 13, 14, 15):
        assert torch.equal(answer[0, unseen], torch.zeros(16, dtype=torch.float64))
    assert (answer[0, [3, 4, 6, 10]] != 0).all()


@pytest.mark.parametrize("router", ["experts_choose", "tokens_choose"])
def test_tokens_without_an_expert_are_answered_by_exact_zeros(router: str) -> None:
    part = _moe(router=router, capacity_factor=0.25)
    answer, routes = part(_hidden(2))
    taken = torch.zeros(32, dtype=torch.bool)
    if router == "experts_choose":
        taken[routes.chosen.flatten()] = True
    else:
        taken = (routes.chosen >= 0).flatten()
    assert 0 < taken.sum() < 32
    assert torch.equal((answer.flatten(0, 1) != 0).any(-1), taken)


@settings(max_examples=30)
@given(
    router=st.sampled_from(["experts_choose", "tokens_choose"]),
    prioritized=st.booleans(),
    percent=st.integers(1, 400),
    group_size=st.integers(1, 64),
    floor=st.integers(1, 4),
    rows=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_every_budget_computes_the_papers_sum(
    router: str, prioritized: bool, percent: int, group_size: int, floor: int, rows: int, seed: int
) -> None:
    settings_ = {"router": router, "batch_prioritized": prioritized, "min_capacity": floor, "num_experts": 4}
    part = _moe(**settings_)
    part.percent, part.group_size = percent, group_size
    x = _hidden(rows, seed)
    stated = {**settings_, "capacity_factor": percent / 100, "group_size": group_size}
    expected = mixer_reference.moe(stated, _weights(part), "moe", x.flatten(0, 1).numpy())
    np.testing.assert_allclose(part(x)[0].flatten(0, 1).numpy(), expected, atol=1e-10)


@settings(max_examples=20)
@given(percent=st.integers(25, 400), kept=st.integers(1, 4), seed=st.integers(0, 99))
def test_experts_that_are_left_out_take_their_terms_with_them_and_nothing_else(
    percent: int, kept: int, seed: int
) -> None:
    part, x = _moe(), _hidden(2, seed)
    part.percent = percent
    whole, routes = part(x)
    silent = _moe()
    silent.percent = percent
    silent.experts.down_weight[kept:] = 0
    silent.experts.down_bias[kept:] = 0
    expected, _ = silent(x)
    part.kept = kept
    answer, fewer = part(x)
    assert torch.equal(answer, expected)
    assert torch.equal(fewer.own, routes.own[:, :kept])
    assert torch.equal(fewer.scores, routes.scores)
    assert torch.equal(answer, whole) == (kept == 4)


@settings(max_examples=20)
@given(less=st.integers(25, 400), more=st.integers(25, 400), seed=st.integers(0, 99))
def test_a_lower_capacity_takes_away_the_terms_of_the_lowest_gates(less: int, more: int, seed: int) -> None:
    less, more = sorted((less, more))
    part, x = _moe(), _hidden(1, seed)
    part.percent = more
    _, all_ = part(x)
    part.percent = less
    answer, some = part(x)
    slots = some.own.shape[2]
    assert torch.equal(some.own, all_.own[..., :slots])
    given_, _ = part(x, all_.own[..., :slots])
    assert torch.equal(answer, given_)
    assert (all_.gates[..., slots:] <= all_.gates[..., slots - 1 : slots]).all()


def test_slots_follow_the_rule_at_any_batch() -> None:
    part = _moe(min_capacity=4)
    shapes = {}
    for rows, percent in ((1, 100), (2, 100), (5, 100), (2, 25), (2, 400)):
        part.percent = percent
        shapes[rows, percent] = tuple(part.route(_hidden(rows)).own.shape)
    assert shapes == {
        (1, 100): (1, 4, 4),
        (2, 100): (1, 4, 8),
        (5, 100): (1, 4, 20),
        (2, 25): (1, 4, 4),  # 2, but at least 4
        (2, 400): (1, 4, 32),
    }
    part.percent, part.group_size = 100, 16
    assert part.route(_hidden(5)).own.shape == (5, 4, 4)


def test_a_capacity_of_no_slots_is_refused() -> None:
    part = _moe(min_capacity=0)
    part.percent = 1
    message = r"^1 % of 16 tokens over 4 experts rounds to 0 slots \(half_even, min_capacity 0\)$"
    with pytest.raises(PlanError, match=message):
        part(_hidden(1))


def test_half_precision_keeps_its_dtype_while_the_router_does_not() -> None:
    part = _moe().to(torch.bfloat16)
    answer, routes = part(_hidden(1).to(torch.bfloat16))
    assert answer.dtype == torch.bfloat16
    assert routes.scores.dtype == torch.float32


@st.composite
def _scores(draw: st.DrawFn) -> torch.Tensor:
    """Scores [G, T, E] of few values, so that ties are everywhere."""
    groups, tokens, experts = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(2, 5))
    values = draw(st.lists(st.integers(0, 3), min_size=groups * tokens * experts, max_size=groups * tokens * experts))
    return torch.tensor(values, dtype=torch.float32).view(groups, tokens, experts) / 4


@given(scores=_scores(), slots=st.integers(1, 9))
def test_experts_choose_their_best_tokens_and_the_lower_token_among_equals(scores: torch.Tensor, slots: int) -> None:
    slots = min(slots, scores.shape[1])
    expected = [mixer_reference.experts_choose(group.numpy(), slots) for group in scores]
    assert experts_choose(scores, slots, scores.shape[2]).tolist() == expected


@given(scores=_scores(), slots=st.integers(1, 9), prioritized=st.booleans())
def test_tokens_choose_their_best_expert_and_wait_in_order(scores: torch.Tensor, slots: int, prioritized: bool) -> None:
    expected = [mixer_reference.tokens_choose(group.numpy(), slots, prioritized) for group in scores]
    assert tokens_choose(scores, slots, prioritized).tolist() == expected


@given(scores=_scores(), slots=st.integers(1, 9), fewer=st.integers(1, 9), kept=st.integers(1, 5))
def test_fewer_slots_of_experts_that_choose_are_a_prefix(
    scores: torch.Tensor, slots: int, fewer: int, kept: int
) -> None:
    tokens, experts = scores.shape[1:]
    slots, fewer, kept = min(slots, tokens), min(fewer, slots, tokens), min(kept, experts)
    whole = experts_choose(scores, slots, experts)
    part = experts_choose(scores, fewer, kept)
    assert torch.equal(part, whole[:, :kept, :fewer])
    gates = gates_of(scores, whole, "experts_choose")
    assert torch.equal(gates_of(scores, part, "experts_choose"), gates[:, :kept, :fewer])
    assert (gates.diff(dim=-1) <= 0).all()


@given(scores=_scores(), slots=st.integers(1, 9), fewer=st.integers(1, 9), prioritized=st.booleans())
def test_with_fewer_slots_tokens_that_choose_only_drop_out(
    scores: torch.Tensor, slots: int, fewer: int, prioritized: bool
) -> None:
    more, less = (tokens_choose(scores, n, prioritized) for n in (slots, min(fewer, slots)))
    assert torch.equal(torch.where(less == DROPPED, more, less), more)
    assert torch.equal(torch.where(more == DROPPED, first_choice(scores), more), first_choice(scores))
    for expert in range(scores.shape[2]):
        wished = (first_choice(scores) == expert).sum(-1)
        assert torch.equal((more == expert).sum(-1), wished.clamp(max=slots))


def test_priority_serves_the_surest_tokens_and_order_the_first() -> None:
    scores = torch.tensor([[[0.6, 0.4], [0.2, 0.8], [0.9, 0.1], [0.7, 0.3], [0.7, 0.3]]])
    assert tokens_choose(scores, 2, prioritized=False).tolist() == [[0, 1, 0, -1, -1]]
    assert tokens_choose(scores, 2, prioritized=True).tolist() == [[-1, 1, 0, 0, -1]]


def test_groups_are_routed_apart() -> None:
    scores = torch.rand(3, 8, 4, generator=torch.Generator().manual_seed(0))
    for choose in (lambda s: experts_choose(s, 3, 4), lambda s: tokens_choose(s, 2, True)):
        assert torch.equal(choose(scores), torch.cat([choose(group[None]) for group in scores]))


def test_gates_are_the_scores_as_they_are_and_zero_where_dropped() -> None:
    scores = torch.tensor([[[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]]])
    taken = torch.tensor([[[1, 0], [0, 1]]])  # of two experts that are kept
    assert gates_of(scores, taken, "experts_choose").tolist() == scores.new_tensor([[[0.5, 0.1], [0.7, 0.3]]]).tolist()
    chosen = torch.tensor([[2, DROPPED]])
    assert gates_of(scores, chosen, "tokens_choose").tolist() == scores.new_tensor([[0.2, 0.0]]).tolist()


@pytest.mark.parametrize(
    ("given_", "computed"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)],
)
def test_the_router_computes_in_float32_at_least(given_: torch.dtype, computed: torch.dtype) -> None:
    router = Router(8, 4).requires_grad_(False).to(given_)
    tokens = torch.randn(1, 5, 8).to(given_)
    logits = router(tokens)
    assert logits.dtype == computed
    precise = tokens.double().numpy() @ router.weight.double().numpy().T + router.bias.double().numpy()
    np.testing.assert_allclose(logits.numpy(), precise, atol=1e-6)  # float16 would be off by 1e-3
