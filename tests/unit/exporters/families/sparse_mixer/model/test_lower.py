from __future__ import annotations

from typing import Any

import pytest
import torch
from nestforge.exporters.families.sparse_mixer.mixing import FoldedMixing
from nestforge.exporters.families.sparse_mixer.model import lower
from nestforge.exporters.families.sparse_mixer.static_moe import StaticMoE
from nestforge.exporters.modules.layers import Answering
from support.tiny_mixer import mixer_config, tiny_mixer

VARIANTS = {"moe.dispatch": "gather", "moe.products": "per_expert", "moe.combine": "scatter"}


def ids() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(0, 24, (2, 16), generator=draw), torch.randint(0, 2, (2, 16), generator=draw)


@pytest.mark.parametrize(
    ("settings", "variants"),
    [
        ({}, VARIANTS),
        ({"mixing": "hartley"}, {**VARIANTS, "mixing": "dense"}),
        ({"mixing": "hartley", "head": "masked_lm"}, {**VARIANTS, "mixing": "folded"}),
    ],
)
def test_outputs_then_routes_by_layer(settings: dict[str, Any], variants: dict[str, str]) -> None:
    module = Answering(tiny_mixer(mixer_config(**settings)))
    outputs, routes = module.model.routed(*ids())
    found = lower(module, variants)(*ids())
    assert len(found) == len(outputs) + 2
    for one, other in zip(found, outputs, strict=False):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)
    assert torch.equal(found[-2], routes[1].chosen)
    assert torch.equal(found[-1], routes[2].chosen)
    assert found[-1].dtype == torch.int64


def test_shares_the_weights_and_leaves_the_module() -> None:
    module = Answering(tiny_mixer(mixer_config(mixing="hartley")))
    before = {name: type(part) for name, part in module.named_modules()}
    copy = lower(module, {**VARIANTS, "mixing": "folded"})
    assert {name: type(part) for name, part in module.named_modules()} == before
    mine, theirs = dict(module.named_parameters()), dict(copy.named_parameters())
    assert mine.keys() == theirs.keys()
    assert all(theirs[name] is parameter for name, parameter in mine.items())
    kinds = [type(part) for part in copy.modules()]
    assert (kinds.count(StaticMoE), kinds.count(FoldedMixing)) == (2, 2)


def test_a_model_without_experts_or_spectra_has_no_decisions() -> None:
    config = mixer_config(moe_layers=(), num_experts=0, expert_intermediate_size=None)
    module = Answering(tiny_mixer(config))
    for one, other in zip(lower(module, {})(*ids()), module(*ids()), strict=True):
        assert torch.equal(one, other)
