from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from nestforge.exporters.families.coda.config import SoftTopK
from nestforge.exporters.families.coda.routing import soft_top_k

ANNEALED = SoftTopK(rounds=20, epsilon=0.1, epsilon_start=4.0, epsilon_decay=0.7, initial="zero")
CONSTANT = SoftTopK(rounds=20, epsilon=1.0, epsilon_start=1.0, epsilon_decay=1.0, initial="zero")
SCHEDULES = {
    "annealed": ANNEALED,
    "sharp": replace(ANNEALED, epsilon=0.02),
    "constant": CONSTANT,
    "from minus the scores": replace(CONSTANT, initial="minus_scores"),
    "annealed, from minus the scores": replace(ANNEALED, initial="minus_scores"),
    "one round": replace(ANNEALED, rounds=1),
}


def literal(scores: torch.Tensor, count: int, schedule: SoftTopK) -> torch.Tensor:
    """The paper's loop over the vector b and the number a, in float64, with nothing done against overflow."""
    s = scores.double()
    b = torch.zeros_like(s) if schedule.initial == "zero" else -s
    a = torch.zeros_like(s[..., :1])
    for number in range(schedule.rounds):
        epsilon = max(schedule.epsilon_start * schedule.epsilon_decay**number, schedule.epsilon)
        a = epsilon * math.log(count) - epsilon * torch.exp((s + b) / epsilon).sum(-1, keepdim=True).log()
        b = torch.minimum(-s - a, torch.zeros_like(s))
    return torch.exp((s + b + a) / schedule.epsilon)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(("tokens", "count"), [(512, 171), (64, 1), (64, 64), (7, 3)])
def test_the_stable_form_is_the_paper_s_loop(tokens: int, count: int, schedule: SoftTopK) -> None:
    """Where the loop neither overflows nor underflows: float64 to 1e-9, float32 to 1e-4."""
    torch.manual_seed(tokens + count)
    scores = torch.randn(4, tokens, dtype=torch.float64)
    expected = literal(scores, count, schedule)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(soft_top_k(scores, count, schedule), expected, rtol=0, atol=1e-9)
    found = soft_top_k(scores.float(), count, schedule)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


def test_one_of_n_is_a_softmax() -> None:
    scores = torch.randn(3, 40, dtype=torch.float64)
    expected = (scores / CONSTANT.epsilon).softmax(-1)
    torch.testing.assert_close(soft_top_k(scores, 1, CONSTANT), expected, rtol=0, atol=1e-12)


def test_gates_keep_the_order_of_the_scores_and_their_sum() -> None:
    scores = torch.randn(8, 512, dtype=torch.float64).sort(-1).values
    gates = soft_top_k(scores, 171, CONSTANT)
    assert (gates.diff(dim=-1) >= 0).all()
    assert ((gates > 0) & (gates <= 1)).all()
    torch.testing.assert_close(gates.sum(-1), torch.full((8,), 171.0, dtype=torch.float64), rtol=1e-3, atol=0)


def test_too_few_rounds_stay_too_few() -> None:
    """Twenty annealed rounds end short of the optimum: what was trained is the iteration, not its limit."""
    scores = torch.randn(8, 512, dtype=torch.float64)
    shares = soft_top_k(scores, 171, ANNEALED).sum(-1) / 171
    assert (shares > 0.8).all()
    assert (shares < 0.95).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_scores_give_numbers(dtype: torch.dtype) -> None:
    scores = torch.randn(3, 32, dtype=dtype)
    scores[0, 5:], scores[1] = -1e9, -1e9
    for schedule in SCHEDULES.values():
        gates = soft_top_k(scores, 8, schedule)
        assert ((gates >= 0) & (gates <= 1)).all()
