"""The demonstration over a few steps of training: one task and one kind of keys, compiled in this process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import nestforge
import pytest
from nestforge.bucket import Bucket
from nestforge.examples.coda import __main__ as coda
from nestforge.examples.coda import train as training
from nestforge.examples.coda.__main__ import Measured, quality_table, routing_table
from nestforge.examples.coda.fit import Trainer, accuracy
from nestforge.examples.coda.train import DENSE, RECIPE
from nestforge.examples.matformer.tasks import read_digits
from nestforge.exporters.families.coda.model import load_model
from support.tiny_compile import board

TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
TASK = "upright"


def _compile(model: Path, bundle: Path, *options: str) -> bool:
    device = board(budgets={"full": {}}, buckets=["8x1"])
    tasks = {TASK: Path(options[options.index("--task") + 1].partition("=")[2])}
    nestforge.compile(model, device, bundle, measure=False, levels={"coda.reduction": (0.5, 1)}, tasks=tasks)
    return True


def test_every_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = replace(RECIPE, dense_steps=2, task_steps=2, batch=4, adapter_size=2)
    for module in (training, coda):
        monkeypatch.setattr(module, "TASKS", (TASK,))
        monkeypatch.setattr(module, "KEYS", ("selected",))
    monkeypatch.setattr(training, "TRAINER", Trainer(recipe))
    monkeypatch.setattr(training, "DENSE", {**DENSE, **TINY})
    monkeypatch.setattr(training.os, "cpu_count", lambda: 1)
    training.train_all(tmp_path, lambda *_: None)
    monkeypatch.setattr(coda, "FOLDER", tmp_path)
    monkeypatch.setattr(coda, "BUCKETS", (Bucket(8, 1),))
    monkeypatch.setattr(coda, "REDUCTIONS", (2, 1))
    monkeypatch.setattr(coda, "compile_once", _compile)

    found = coda.tables(json.loads((tmp_path / "training.json").read_bytes()))
    quality, routing = found.values()
    commonest, unseen = (title.rpartition(": ")[2] for title in next(iter(found)).split(";"))
    assert (commonest, unseen[-2:]) == ("10.3%", "%)")
    assert [list(row[:3]) for row in quality.rows] == [["k-to-k", "2", "33"], ["k-to-k", "1", "65"]]
    assert [quality.rows[1][place] for place in (5, 7)] == ["1.00x", "1.00x"]
    model, rows = load_model(tmp_path / f"{TASK}-selected"), read_digits().test
    for row, model.reduction in zip(quality.rows, (2, 1), strict=True):
        assert row[3] == f"{accuracy(model(rows.inputs), rows):.1%}", "of engines, and of PyTorch"
    assert coda._has(tmp_path / "selected.bundle", {TASK: tmp_path / f"{TASK}-selected-task"})
    assert not coda._has(tmp_path / "selected.bundle", {})
    assert [list(row[:2]) for row in routing.rows] == [["k-to-k", str(r)] for r in (8, 5, 3, 2)]


def test_each_reduction_beside_the_dense_adapter_model() -> None:
    found = [
        Measured("selected", 4, 16, 0.75, 1_000_000, (0.5, 8.0)),
        Measured("selected", 1, 64, 0.8, 4_000_000, (1.0, 20.0)),
        Measured("all", 1, 64, 0.9, 4_000_000, (2.0, 30.0)),
    ]
    table = quality_table(found, [Bucket(1, 1), Bucket(64, 1)])
    assert table.columns[-4:] == ["ms, batch 1", "faster", "ms, batch 64", "faster"]
    assert [list(row) for row in table.rows] == [
        ["k-to-k", "4", "16", "75.0%", "1.00", "4.00x", "0.500", "2.00x", "8.000", "2.50x"],
        ["k-to-k", "1", "64", "80.0%", "4.00", "1.00x", "1.000", "1.00x", "20.000", "1.00x"],
        ["k-to-all", "1", "64", "90.0%", "4.00", "1.00x", "2.000", "1.00x", "30.000", "1.00x"],
    ]


def test_gates_and_choices_of_each_layer() -> None:
    layers = [
        {"mean_gate": 0.5, "gates_vanished": 0.0, "ink": 0.4},
        {"mean_gate": 0.25, "gates_vanished": 0.1, "ink": 1.0},
    ]
    table = routing_table({"all": [{"reduction": 8, "layers": layers}, {"reduction": 1, "layers": []}]})
    assert [list(row) for row in table.rows] == [["k-to-all", "8", "0.50 0.25", "5.0%", "40% 100%"]]
