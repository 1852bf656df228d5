"""One level a step, the recipe's probabilities, what a step does to neurons that it does not have, and figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from nestforge.examples.train.matformer.fit import draw_levels, fit, loss, quality
from nestforge.examples.train.matformer.recipe import Recipe
from nestforge.examples.train.matformer.tasks import DigitsTask, LanguageTask, Task
from torch.nn import functional

FULL, LAYERS = 16, 2  # of conftest's models


def test_levels_are_drawn_with_the_recipes_probabilities() -> None:
    recipe = Recipe(steps=2500, batch=1, rate=0.0, decay=0.0)
    drawn = draw_levels(recipe, 256, seed=0)
    shares = {width: count / len(drawn) for width, count in Counter(drawn).items()}
    assert shares == pytest.approx({32: 0.20, 64: 0.22, 128: 0.24, 256: 0.34}, abs=0.02)
    assert drawn == draw_levels(recipe, 256, seed=0) != draw_levels(recipe, 256, seed=1)


def test_every_level_learns(language: LanguageTask) -> None:
    task = replace(language, recipe=replace(language.recipe, steps=15, batch=8))
    torch.manual_seed(0)
    data, model = task.data(), task.model(task.config)
    before = quality(task, model, data.validation)["loss"]
    told: list[tuple[int, int]] = []
    drawn = draw_levels(task.recipe, FULL, seed=0)
    fit(task, model, data, len(drawn), 0, drawn, lambda done, steps: told.append((done, steps)))
    assert told == [(step, 60) for step in range(1, 61)]
    for width in task.recipe.widths(FULL).values():
        assert quality(task, model, data.validation, [width] * LAYERS)["loss"] < before - 1


def test_the_same_seed_gives_the_same_weights(task: Task) -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        model = task.model(task.config)
        fit(task, model, task.data(), 4, 3, [2, 16, 4, 8])
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_step_moves_neurons_of_larger_levels_by_weight_decay_alone(task: Task) -> None:
    model = task.model(task.config)
    before = {name: data.clone() for name, data in model.state_dict().items()}
    fit(task, model, task.data(), 1, 0, [4])
    kept = 1 - task.recipe.rate * task.recipe.decay
    for layer in range(LAYERS):
        up, down = f"layers.{layer}.ffn.up.weight", f"layers.{layer}.ffn.down.weight"
        after = model.state_dict()
        assert torch.allclose(after[up][4:], before[up][4:] * kept, rtol=1e-6, atol=0)
        assert torch.allclose(after[down][:, 4:], before[down][:, 4:] * kept, rtol=1e-6, atol=0)
        assert not torch.allclose(after[up][:4], before[up][:4] * kept, rtol=1e-3)
        assert not torch.allclose(after[down][:, :4], before[down][:, :4] * kept, rtol=1e-3)


def test_quality_is_the_mean_over_all_targets(language: LanguageTask, digits: DigitsTask) -> None:
    for task in (language, digits):
        model, rows = task.model(task.config), task.data().validation
        with torch.no_grad():
            logits = task.logits(model, rows.inputs, [8] * LAYERS)
            figures = quality(task, model, rows, [8] * LAYERS)
            whole = loss(task, model, rows, [8] * LAYERS).item()
        classes = logits.shape[-1]
        expected = functional.cross_entropy(logits.reshape(-1, classes), rows.targets.reshape(-1)).item()
        assert figures["loss"] == pytest.approx(expected, rel=1e-5)
        assert whole == pytest.approx(expected, rel=1e-5)
        assert figures["accuracy"] == (logits.argmax(-1) == rows.targets).double().mean().item()
