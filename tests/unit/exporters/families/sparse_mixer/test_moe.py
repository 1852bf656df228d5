"""Tests."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nestforge.exporters.families.sparse_mixer.moe import (
    DROPPED,
    MoE,
    Router,
    StaticMoE,
    experts_choose,
    gates_of,
    tokens_choose,
)
from support import mixer_reference
from support.tiny_mixer import mixer_config, tiny_mixer


def _moe(**settings_: Any) -> MoE:
    """The first experts of the tiny model, in float64."""
    return tiny_mixer(mixer_config(**settings_)).layers[1].moe.double()


def _weights(part: MoE) -> dict[str, np.ndarray[Any, Any]]:
    return {f"moe.{name}": value.numpy() for name, value in part.named_parameters()}


def _hidden(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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


VARIANTS = [
    {"moe.dispatch": dispatch, "moe.products": products, "moe.combine": combine}
    for dispatch, products, combine in product(
        ("gather", "one_hot"), ("per_expert", "batched"), ("scatter", "gather", "one_hot")
    )
]
CHEAPEST = {"moe.dispatch": "gather", "moe.products": "per_expert", "moe.combine": "scatter"}
ROUTERS: list[dict[str, Any]] = [
    {"router": "experts_choose"},
    {"router": "tokens_choose"},
    {"router": "tokens_choose", "batch_prioritized": False},
]


def moe_of(percent: int = 100, group_size: int = 4096, **settings: Any) -> MoE:
    moe = tiny_mixer(mixer_config(**settings)).layers[1].moe
    assert isinstance(moe, MoE)
    moe.percent, moe.group_size = percent, group_size
    return moe


def keep(moe: MoE, experts: int) -> MoE:
    moe.kept = experts
    for name, weights in list(moe.experts.named_parameters()):
        setattr(moe.experts, name, torch.nn.Parameter(weights[:experts], requires_grad=False))
    return moe


def tokens(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("settings", ROUTERS)
@pytest.mark.parametrize(("percent", "group_size"), [(100, 4096), (50, 16), (175, 8), (400, 4096)])
def test_every_form_is_the_same_function(settings: dict[str, Any], percent: int, group_size: int) -> None:
    moe, x = moe_of(percent, group_size, **settings), tokens()
    expected, routes = moe(x)
    for variants in VARIANTS:
        answer, found = StaticMoE(moe, variants)(x)
        torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(found.chosen, routes.chosen)
        torch.testing.assert_close(found.gates, routes.gates)


def test_fewer_experts_leave_their_terms_out() -> None:
    moe, x = keep(moe_of(group_size=16), 3), tokens()
    for variants in VARIANTS:
        torch.testing.assert_close(StaticMoE(moe, variants)(x)[0], moe(x)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("percent", "router"), [(100, "experts_choose"), (50, "tokens_choose")])
def test_static_forms_answer_tokens_without_an_expert_by_exact_zeros(percent: int, router: str) -> None:
    """A sum that adds is told from one that overwrites, and a zero from stale memory."""
    moe, x = moe_of(percent, router=router), tokens()
    answer = moe(x)[0].flatten(0, 1)
    unseen = ~answer.any(-1)
    assert 0 < unseen.sum() < len(unseen)
    for variants in VARIANTS:
        assert not StaticMoE(moe, variants)(x)[0].flatten(0, 1)[unseen].any()


def test_sums_run_from_the_first_expert_on() -> None:
    """The order of the reference, so that engines of one variant give one answer to the last bit."""
    moe, x = moe_of(200), tokens()
    scatter, gather = (StaticMoE(moe, {**CHEAPEST, "moe.combine": combine})(x)[0] for combine in ("scatter", "gather"))
    assert torch.equal(scatter, gather)


def test_static_forms_take_no_decisions() -> None:
    moe, x = moe_of(), tokens()
    with pytest.raises(ValueError, match="its own routes"):
        StaticMoE(moe, CHEAPEST)(x, moe.route(x).chosen)
