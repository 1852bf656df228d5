"""One level a step, the recipe's probabilities, what a step does to neurons that it does not have, and figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from nestforge.examples.matformer.fit import (
    Run,
    baseline_config,
    draw_levels,
    fit,
    loss,
    quality,
    train,
)
from nestforge.examples.matformer.recipe import (
    DIGITS_CONFIG,
    DIGITS_RECIPE,
    LANGUAGE_CONFIG,
    LANGUAGE_RECIPE,
    WRITER_CONFIG,
    WRITER_RECIPE,
    Recipe,
)
from nestforge.examples.matformer.tasks import DigitsTask, LanguageTask, Task
from nestforge.examples.training import Record, side_by_side
from nestforge.exporters.families.matformer.config import NestedConfig
from nestforge.exporters.families.matformer.model import load_model
from nestforge.exporters.source import open_source
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


@pytest.mark.parametrize("recipe", [LANGUAGE_RECIPE, DIGITS_RECIPE, WRITER_RECIPE])
def test_levels_and_probabilities(recipe: Recipe) -> None:
    assert recipe.levels == {"S": 0.125, "M": 0.25, "L": 0.5, "XL": 1.0}
    assert recipe.probabilities == (0.20, 0.22, 0.24, 0.34)
    assert recipe.universal_steps == 4 * recipe.steps
    assert recipe.widths(256) == {"S": 32, "M": 64, "L": 128, "XL": 256}


@pytest.mark.parametrize("config", [LANGUAGE_CONFIG, DIGITS_CONFIG, WRITER_CONFIG])
def test_configurations_make_models_that_say_what_was_trained(config: NestedConfig) -> None:
    assert config.problem() is None
    assert config.nested
    assert config.granularities == {"ffn": (0.125, 0.25, 0.5, 1.0)}


def test_nearly_all_weights_of_the_model_that_writes_are_ffn() -> None:
    assert WRITER_CONFIG.intermediate_size == 16 * WRITER_CONFIG.hidden_size
    assert LANGUAGE_CONFIG.intermediate_size == 4 * LANGUAGE_CONFIG.hidden_size
    assert DIGITS_CONFIG.intermediate_size == 4 * DIGITS_CONFIG.hidden_size


def test_the_language_model_has_the_ladder_of_the_papers_models() -> None:
    assert LANGUAGE_CONFIG.num_hidden_layers == 16
    assert LANGUAGE_CONFIG.vocab_size == 256


def test_a_universal_run_publishes_what_it_measured(task: Task, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    record = train(task, Run(0, folder=folder))
    source, model = open_source(folder), load_model(folder)
    assert source.spec.trained_nested
    assert record["parameters"] == source.parameters(source.spec.universal())
    assert {name: level["width"] for name, level in record["levels"].items()} == {"S": 2, "M": 4, "L": 8, "XL": 16}
    data = task.data()
    for level in record["levels"].values():
        widths = [level["width"]] * task.config.num_hidden_layers
        assert level["test"] == pytest.approx(quality(task, model, data.test, widths))
        assert level["validation"] == pytest.approx(quality(task, model, data.validation, widths))


def test_a_baseline_is_a_plain_model_of_the_levels_size(task: Task) -> None:
    config = baseline_config(task, "M")
    assert (config.widths, config.nested, config.granularities) == ((4, 4), False, None)
    record = train(task, Run(0, "M"))
    universal = train(task, Run(0))
    assert list(record["levels"]) == ["M"]
    per_neuron = (universal["parameters"] - record["parameters"]) / (2 * (16 - 4))
    biases = 1 if task.name == "vit" else 0
    assert per_neuron == 2 * task.config.hidden_size + biases


def test_the_text_model_takes_text(language: LanguageTask, tmp_path: Path) -> None:
    train(language, Run(0, folder=tmp_path / "model"))
    assert open_source(tmp_path / "model").signature.text is not None


def test_processes_and_threads_change_no_result(language: LanguageTask) -> None:
    task = replace(language, recipe=replace(language.recipe, steps=1))
    runs = [Run(0, "S"), Run(1, "S")]
    results: list[dict[Run, Record]] = []
    for jobs in (1, 2):
        found: dict[Run, Record] = {}
        side_by_side(partial(train, task), runs, jobs, found.__setitem__)
        results.append({run: found[run]["levels"] for run in runs})
    assert results[0] == results[1]
    assert results[0][runs[0]] != results[0][runs[1]]
