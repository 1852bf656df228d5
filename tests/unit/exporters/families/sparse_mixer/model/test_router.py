from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nestforge.exporters.families.sparse_mixer.moe import (
    DROPPED,
    Router,
    experts_choose,
    first_choice,
    gates_of,
    tokens_choose,
)
from support import mixer_reference


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
