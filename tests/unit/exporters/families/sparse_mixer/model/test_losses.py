from __future__ import annotations

import numpy as np
import torch
from nestforge.examples.sparse_mixer.fit import balance_loss, routing_loss, z_loss
from nestforge.exporters.families.sparse_mixer.moe import Routes
from support.tiny_mixer import mixer_config, tiny_mixer


def _routes(router: str) -> Routes:
    ids = torch.randint(1, 24, (2, 16), generator=torch.Generator().manual_seed(0))
    model = tiny_mixer(mixer_config(router=router, group_size=8)).train().requires_grad_(True)
    return model.routed(ids, torch.zeros_like(ids))[1][1]


def test_the_balance_loss_is_the_papers() -> None:
    scores = _routes("tokens_choose").scores.detach()  # [4, 8, 4]
    total = 0.0
    for group in scores.double().numpy():
        share = np.bincount(group.argmax(-1), minlength=4) / 8
        total += 4 * float(share @ group.mean(0)) / 4  # E, and the mean over 4 groups
    np.testing.assert_allclose(balance_loss(scores).item(), total, rtol=1e-6)


def test_balance_counts_wishes_and_not_what_capacity_served() -> None:
    even = torch.eye(4).repeat(1, 2, 1)  # 8 tokens, two for each expert
    assert balance_loss(even).item() == 1.0
    one = torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(1, 8, 1)
    assert balance_loss(one).item() == 4.0
    assert balance_loss(torch.full((1, 8, 4), 0.25)).item() == 1.0  # all wish for expert 0, no score prefers it


def test_the_z_loss_is_the_papers() -> None:
    logits = _routes("experts_choose").logits.detach()
    expected = np.mean(np.log(np.exp(logits.double().numpy()).sum(-1)) ** 2)
    np.testing.assert_allclose(z_loss(logits).item(), expected, rtol=1e-6)
    assert z_loss(torch.full((1, 3, 4), -np.log(4))).item() < 1e-12


def test_the_loss_of_a_model_is_weighted_and_summed_over_layers() -> None:
    for router in ("experts_choose", "tokens_choose"):
        layer = _routes(router)
        loss = routing_loss([layer, layer], mixer_config(router=router).router)
        expected = 2 * 1e-4 * z_loss(layer.logits)
        if router == "tokens_choose":
            expected = expected + 2 * 0.01 * balance_loss(layer.scores)
        torch.testing.assert_close(loss, expected)
        (slope,) = torch.autograd.grad(loss, layer.logits)
        assert slope.abs().sum() > 0
    assert routing_loss([], "experts_choose").item() == 0.0
