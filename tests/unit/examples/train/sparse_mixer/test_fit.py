"""What is learnt, and figures that are means over all hidden bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nestforge.examples.train.sparse_mixer.fit import answers, dropped_share, fit, loss, quality
from nestforge.examples.train.sparse_mixer.masked_bytes import MaskedBytes
from nestforge.examples.train.sparse_mixer.recipe import Recipe
from nestforge.examples.train.sparse_mixer.start import draw_start
from nestforge.exporters.families.sparse_mixer.architecture.config import SparseMixerConfig
from nestforge.exporters.families.sparse_mixer.model.encoder import SparseMixer
from nestforge.exporters.families.sparse_mixer.model.losses import BALANCE_WEIGHT, Z_WEIGHT, balance_loss, z_loss
from nestforge.exporters.families.sparse_mixer.model.router import Routes
from torch.nn import functional


def started(config: SparseMixerConfig) -> SparseMixer:
    torch.manual_seed(0)
    model = SparseMixer(config)
    draw_start(model)
    return model


def test_every_model_learns(config: SparseMixerConfig, data: MaskedBytes) -> None:
    model, recipe = started(config), Recipe(steps=40, batch=8, decay=0.1, share=0.25, held_out=8)
    before = quality(model, data.validation, 4)
    told: list[tuple[int, int]] = []
    fit(model, data.batches(8, 40, 0), recipe, 1e-2, lambda done, steps: told.append((done, steps)))
    assert told == [(step, 40) for step in range(1, 41)]
    assert quality(model, data.validation, 4)["loss"] < before["loss"] - 1


def test_the_same_batches_give_the_same_weights(config: SparseMixerConfig, data: MaskedBytes) -> None:
    recipe = Recipe(steps=3, batch=4, decay=0.1, share=0.25, held_out=8)
    results = []
    for _ in range(2):
        model = started(config)
        fit(model, data.batches(4, 3, 7), recipe, 1e-2)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@torch.no_grad()
def test_routers_add_their_losses(models: dict[str, SparseMixerConfig], data: MaskedBytes) -> None:
    rows = data.test.part(0, 4)
    for name in models:
        model = started(models[name])
        logits, routes = answers(model, rows)
        expected = functional.cross_entropy(logits.flatten(0, 1), rows.targets.flatten())
        if name != "peer":
            expected = expected + Z_WEIGHT * z_loss(routes[1].logits)
        if name == "tokens":
            expected = expected + BALANCE_WEIGHT * balance_loss(routes[1].scores)
        assert loss(model, rows).item() == pytest.approx(expected.item(), rel=1e-6)


@torch.no_grad()
def test_figures_are_means_over_all_hidden_bytes(config: SparseMixerConfig, data: MaskedBytes) -> None:
    model = started(replace(config, group_size=16))  # a row is a group, so that batches change nothing
    whole = model(data.test.inputs, torch.zeros_like(data.test.inputs))[0]
    chosen = torch.stack([row[at] for row, at in zip(whole, data.test.positions, strict=True)])  # [N, K, V]
    found = quality(model, data.test, 4)
    nats = functional.cross_entropy(chosen.flatten(0, 1), data.test.targets.flatten()).item()
    assert found["loss"] == pytest.approx(nats, rel=1e-5)
    assert found["accuracy"] == (chosen.argmax(-1) == data.test.targets).double().mean().item()
    assert found["dropped"].keys() == {str(layer) for layer in config.moe_layers}


def test_dropped_are_the_tokens_of_no_expert() -> None:
    scores = torch.full((2, 4, 2), 0.5)  # two groups of four tokens
    experts = torch.tensor([[[0, 1], [1, 2]], [[3, 2], [2, 3]]])  # token 3 of the first, 0 and 1 of the second
    tokens = torch.tensor([[0, 1, -1, 0], [1, 0, 1, 1]])
    for chosen, share in ((experts, 3 / 8), (tokens, 1 / 8)):
        assert dropped_share(Routes(scores, scores, chosen, chosen, chosen.double())) == share
