"""One run on one thread, and many side by side with the same results."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from nestforge.examples.train.matformer.fit import quality
from nestforge.examples.train.matformer.runs import Run, baseline_config, train
from nestforge.examples.train.matformer.tasks import LanguageTask, Task
from nestforge.examples.train.side_by_side import side_by_side
from nestforge.examples.train.stages import Record
from nestforge.exporters.families.matformer.folder import load_model
from nestforge.exporters.source import open_source


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
