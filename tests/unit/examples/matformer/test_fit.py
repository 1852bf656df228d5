"""Levels, probabilities and figures of training; the digits; and how a bundle writes."""

from collections import Counter
from collections.abc import Iterator
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
    Recipe,
)
from nestforge.examples.matformer.tasks import DigitsTask, LanguageTask, Task, read_digits
from nestforge.examples.matformer.writing import agreement, levels_of, ways_of_writing, ways_table
from nestforge.examples.training import Record, side_by_side
from nestforge.exporters.family import load_model
from nestforge.exporters.source import open_source
from nestforge.runtime.load import load
from nestforge.runtime.model import ElasticModel
from support.generating import llama_folder
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


def test_processes_and_threads_change_no_result(language: LanguageTask) -> None:
    task = replace(language, recipe=replace(language.recipe, steps=1))
    runs = [Run(0, "S"), Run(1, "S")]
    here: dict[Run, Record] = {}
    elsewhere: dict[Run, Record] = {}
    side_by_side(partial(train, task), runs, 1, here.__setitem__)
    side_by_side(partial(train, task), runs[:1], 2, elsewhere.__setitem__)
    assert elsewhere[runs[0]]["levels"] == here[runs[0]]["levels"] != here[runs[1]]["levels"]


DIGITS = read_digits()


def test_the_split_is_fixed_and_has_every_image_once() -> None:
    parts = (DIGITS.train, DIGITS.validation, DIGITS.test)
    assert [len(part.targets) for part in parts] == [1078, 359, 360]
    assert torch.cat([part.targets for part in parts]).bincount().tolist() == [
        *(178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
    ]
    assert all(part.targets.bincount(minlength=10).min() > 0.09 * len(part.targets) for part in parts)
    assert read_digits().facts == DIGITS.facts
    for part in parts:
        assert part.inputs.shape == (len(part.targets), 1, 8, 8)
        assert part.inputs.aminmax() == (0.0, 1.0)


def test_batches_are_distorted_images_that_the_seed_decides() -> None:
    first, again, other = (list(DIGITS.batches(16, 3, seed)) for seed in (0, 0, 1))
    assert [len(batch.targets) for batch in first] == [16, 16, 16]
    assert all(torch.equal(one.inputs, two.inputs) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0].targets, other[0].targets)
    whole = {image.numpy().tobytes() for image in DIGITS.train.inputs}
    assert not any(image.numpy().tobytes() in whole for batch in first for image in batch.inputs)
    assert all(batch.inputs.min() >= 0 and batch.inputs.max() <= 1 for batch in first)


PROMPTS = ("one two", "three")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory) / "bundle"


@pytest.fixture
def model(bundle: Path) -> Iterator[ElasticModel]:
    with load(bundle, threads=1) as opened:
        yield opened


def test_every_way_writes_and_what_was_drafted_is_the_largest_levels_own_text(model: ElasticModel) -> None:
    assert levels_of(model.bundle.manifest) == ["XL", "L", "M", "S"]
    ways = ways_of_writing(model, PROMPTS, tokens=12)
    names = [way.name for way in ways]
    assert names[:4] == ["XL", "L", "M", "S"]
    assert names[4].endswith("tokens a second requested")
    assert names[5:] == [f"XL, drafted by {draft}" for draft in ("S", "M", "L", "n-gram", "auto")]
    own = [model.generate(prompt, max_tokens=12, submodel="XL").text for prompt in PROMPTS]
    for way in (ways[0], *ways[5:]):
        assert list(way.texts) == own
        assert way.shares == {"XL": 1.0}
    assert ways[3].shares == {"S": 1.0}
    assert ways[0].accepted is None
    assert 0.0 <= (ways[5].accepted or 0.0) <= 1.0
    assert all(way.tokens_per_second > 0 for way in ways)
    rows = {row[0]: row for row in ways_table(ways, "XL").rows}
    assert rows["XL"][2:] == ["1.00x", "XL 100%", "-", "yes"]
    assert rows["XL, drafted by S"][-1] == "yes"


def test_a_model_agrees_with_itself(model: ElasticModel) -> None:
    assert agreement(model, model, "XL", PROMPTS) == 1.0
    assert agreement(model, model, "S", PROMPTS) < 1.0
