"""Training learns, and figures are means over all hidden bytes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from nestforge.examples.byte_windows import MaskedBytes
from nestforge.examples.sparse_mixer.fit import (
    BALANCE_WEIGHT,
    Z_WEIGHT,
    Recipe,
    Run,
    Subject,
    Trainer,
    answers,
    balance_loss,
    budgets,
    draw_start,
    dropped_share,
    fit,
    loss,
    quality,
    routing_loss,
    z_loss,
)
from nestforge.exporters.families.sparse_mixer.config import SparseMixerConfig
from nestforge.exporters.families.sparse_mixer.model import SparseMixer
from nestforge.exporters.families.sparse_mixer.moe import Routes
from nestforge.exporters.family import load_model
from nestforge.exporters.source import open_source
from support.tiny_mixer import mixer_config, tiny_mixer
from torch.nn import functional


def started(config: SparseMixerConfig, seed: int = 0) -> SparseMixer:
    torch.manual_seed(seed)
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
    rows = next(data.test.parts(4))
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


def test_the_seed_decides_and_biases_and_norms_stay(config: SparseMixerConfig) -> None:
    first, again, other = started(config), started(config), started(config, 1)
    fixed = ("embeddings.position.weight", "embeddings.projection.weight", "query.weight", "key.weight")
    for (name, one), two, three in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        if name.endswith("bias"):
            assert not one.any()
        elif name.endswith("norm.weight"):
            assert (one == 1).all()
        elif not name.endswith(fixed):
            assert not torch.equal(one, three)


def test_mixing_weighs_by_distance_alone_and_nearer_tokens_more(models: dict[str, SparseMixerConfig]) -> None:
    config = models["experts"]
    for layer in started(config).layers[:2]:
        matrix = layer.mixing.sequence
        assert all(len(set(matrix.diagonal(offset).tolist())) == 1 for offset in range(-15, 16))
        places = torch.arange(16)
        near = (places[:, None] - places).abs() <= 4
        assert matrix[near].square().sum() > 0.8 * matrix.square().sum()


def test_heads_begin_with_a_neighbour_each(models: dict[str, SparseMixerConfig]) -> None:
    config = replace(models["peer"], hidden_size=128, num_attention_heads=4, max_position_embeddings=64)
    model = started(config)
    ids = torch.randint(32, 127, (8, 64))
    hidden = model.embeddings(ids, torch.zeros_like(ids))
    attention = model.layers[0].attention
    queries, keys = (part(hidden).unflatten(2, (4, 32)).transpose(1, 2) for part in (attention.query, attention.key))
    shares = (queries @ keys.transpose(2, 3) / 32**0.5).softmax(-1)  # [B, A, S, S]
    for head, offset in enumerate((1, -1, 2, -2)):
        seen = [shares[:, head].diagonal(-back, dim1=1, dim2=2).mean().item() for back in range(-4, 5)]
        assert max(seen) == seen[4 + offset] > 0.4


def test_positions_and_words_share_no_dimension(models: dict[str, SparseMixerConfig]) -> None:
    tables = started(replace(models["experts"], hidden_size=128, num_attention_heads=4)).embeddings
    assert not tables.word.weight[:, :32].any()
    assert not tables.position.weight[:, 32:].any()
    for part in (tables.word.weight[:, 32:], tables.position.weight[:, :32]):
        assert part.square().mean().sqrt().item() == pytest.approx(0.02, rel=0.02)


OFFERED = ["100 % of 64 tokens", "50 % of 64 tokens", "100 % of 16 tokens"]


def test_budgets_are_the_capacities_then_the_groups(models: dict[str, SparseMixerConfig]) -> None:
    model = SparseMixer(models["experts"])
    moe = model.layers[1].moe
    seen = [(budget, moe.percent, moe.group_size) for budget in budgets(model)]
    assert seen == list(zip(OFFERED, (100, 50, 100), (64, 64, 16), strict=True))
    assert list(budgets(SparseMixer(models["peer"]))) == ["whole"]


def test_a_run_publishes_what_it_measured(config: SparseMixerConfig, trainer: Trainer, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    record = trainer(Run("model", Subject(config, 1e-2), 0, folder))
    source, model, data = open_source(folder), load_model(folder), trainer.data()
    assert source.signature.text is not None
    assert record["parameters"] == source.parameters(source.spec.universal())
    assert [found["budget"] for found in record["quality"]] == (OFFERED if config.moe_layers else ["whole"])
    for _, found in zip(budgets(model), record["quality"], strict=True):
        assert found["test"] == quality(model, data.test, 4)
        assert found["validation"] == quality(model, data.validation, 4)


def test_seeds_have_names_and_figures_of_their_own(subjects: dict[str, Subject], trainer: Trainer) -> None:
    runs = [Run("experts", subjects["experts"], seed) for seed in (0, 1)]
    assert [run.name for run in runs] == ["experts", "experts seed 1"]
    first, second = (trainer(run)["quality"] for run in runs)
    assert first != second


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
