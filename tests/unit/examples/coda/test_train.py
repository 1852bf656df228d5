"""The dense model, its conversion and two tasks in a few steps; what is finished is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from nestforge.examples.coda import train as command
from nestforge.examples.coda.fit import Trainer, is_trained, of_task
from nestforge.examples.coda.train import DENSE, RECIPE
from nestforge.examples.matformer.tasks import read_digits
from nestforge.exporters.families.coda.model import load_model

RUNS = ("upright-selected", "upside-down-selected", "upright-all", "upside-down-all")
TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "patch_size": 1}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(RECIPE, dense_steps=2, task_steps=2, batch=4, adapter_size=2)
    monkeypatch.setattr(command, "TRAINER", Trainer(recipe))
    monkeypatch.setattr(command, "DENSE", {**DENSE, **TINY})
    monkeypatch.setattr(command.os, "cpu_count", lambda: 1)


def test_one_base_for_each_kind_of_keys_and_two_tasks_on_it(tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = CliRunner().invoke(command.main, ["--output", str(output)])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[1:5]] == list(RUNS)
    written = (output / "training.json").read_bytes()
    records = json.loads(written)
    assert set(records) == {"dense", "base-selected", "base-all", *RUNS}
    for name in RUNS:
        base, task = (load_model(output / folder) for folder in (f"base-{name.rpartition('-')[2]}", name))
        trained = 0
        for (parameter, ours), theirs in zip(task.named_parameters(), base.parameters(), strict=True):
            assert is_trained(parameter) or torch.equal(ours, theirs), parameter
            trained += ours.numel() if is_trained(parameter) else 0
        assert records[name]["trained"] == trained
        found = [(figures["reduction"], len(figures["layers"])) for figures in records[name]["reductions"]]
        assert found == [(8, 1), (5, 1), (3, 1), (2, 1), (1, 0)]
    assert CliRunner().invoke(command.main, ["--output", str(output)]).exit_code == 0
    assert (output / "training.json").read_bytes() == written


def test_the_second_task_s_images_are_turned_by_half_a_circle() -> None:
    rows = read_digits().test
    turned = of_task("upside-down", rows)
    assert torch.equal(turned.inputs, rows.inputs.flip(-1, -2))
    assert torch.equal(turned.targets, rows.targets)
    assert of_task("upright", rows) is rows
