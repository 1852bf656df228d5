"""Tests."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from nestforge.exporters.families.sparse_mixer.moe import DROPPED, MoE
from nestforge.exporters.families.sparse_mixer.static_moe import StaticMoE
from support.tiny_mixer import mixer_config, tiny_mixer

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
@pytest.mark.parametrize(("percent", "group_size"), [(100, 4096), (50, 16), (175, 8)])
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


def test_tokens_of_no_one_and_of_several_experts() -> None:
    """What tells a combine that adds from one that overwrites, and an exact zero from stale memory."""
    moe, x = moe_of(), tokens()
    held = torch.bincount(moe.route(x).chosen.flatten(), minlength=48)
    assert {0, 1, 2} <= set(held.tolist())
    for variants in VARIANTS:
        answer, _ = StaticMoE(moe, variants)(x)
        assert not answer.flatten(0, 1)[held == 0].any()
        torch.testing.assert_close(answer, moe(x)[0], atol=1e-5, rtol=1e-5)


def test_a_dropped_token_is_answered_by_zeros() -> None:
    moe, x = moe_of(50, router="tokens_choose"), tokens()
    dropped = moe.route(x).chosen.flatten() == DROPPED
    assert dropped.any()
    assert not dropped.all()
    for variants in VARIANTS:
        assert not StaticMoE(moe, variants)(x)[0].flatten(0, 1)[dropped].any()


def test_an_expert_that_overflows_on_a_token_it_does_not_answer_for_spoils_nothing() -> None:
    """Where tokens choose, left-over slots hold tokens of others at a gate of zero; those must be finite ones."""
    moe, x = moe_of(400, router="tokens_choose"), tokens()
    answer, _ = StaticMoE(moe, CHEAPEST)(x)
    torch.testing.assert_close(answer, moe(x)[0], atol=1e-5, rtol=1e-5)


def test_sums_run_from_the_first_expert_on() -> None:
    """The order of the reference, so that engines of one variant give one answer to the last bit."""
    moe, x = moe_of(200), tokens()
    scatter, gather = (StaticMoE(moe, {**CHEAPEST, "moe.combine": combine})(x)[0] for combine in ("scatter", "gather"))
    assert torch.equal(scatter, gather)


def test_static_forms_take_no_decisions() -> None:
    moe, x = moe_of(), tokens()
    with pytest.raises(ValueError, match="its own routes"):
        StaticMoE(moe, CHEAPEST)(x, moe.route(x).chosen)
