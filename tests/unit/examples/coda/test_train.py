"""Training over a few steps, with what is finished kept, and the demonstration compiled in this process."""

import json
from dataclasses import replace
from pathlib import Path

import nestforge
import pytest
import torch
from click.testing import CliRunner
from nestforge.bucket import Bucket
from nestforge.examples.byte_windows import Rows
from nestforge.examples.coda import __main__ as coda
from nestforge.examples.coda import train as command
from nestforge.examples.coda import train as training
from nestforge.examples.coda.__main__ import Measured, quality_table, routing_table
from nestforge.examples.coda.fit import Trainer, accuracy, fit_task, is_trained, of_task, routing
from nestforge.examples.coda.train import DENSE, RECIPE
from nestforge.examples.matformer.tasks import read_digits
from nestforge.exporters.families.coda.model import CodaEncoder, load_model
from support.tiny_coda import OF_IMAGES, coda_config, tiny_coda
from support.tiny_compile import board

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


SHORT = replace(RECIPE, task_steps=12, task_rate=5e-3, batch=8)
SETTINGS = {**OF_IMAGES, "num_labels": 3, "norm": "layer", "reductions": (5, 3, 2, 1), "reduction_of_one": "dense"}


@pytest.fixture
def model() -> CodaEncoder:
    return tiny_coda(coda_config(**SETTINGS)).train()


def rows(count: int = 8) -> Rows:
    generator = torch.Generator().manual_seed(0)
    return Rows(torch.rand(count, 2, 8, 12, generator=generator), torch.arange(count) % 3)


@torch.no_grad()
def loss(model: CodaEncoder) -> float:
    """For all reductions that training draws."""
    found = 0.0
    for model.reduction in (5, 2, 1):
        found += float(torch.nn.functional.cross_entropy(model(rows().inputs), rows().targets))
    return found


def test_a_task_moves_adapters_routers_scales_and_the_classifier_alone(
    model: CodaEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestforge.examples.coda.fit.REDUCTIONS", (5, 2, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    worse = loss(model)
    fit_task(model, [rows()] * SHORT.task_steps, SHORT, 0)
    moved = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert moved == {name for name in before if is_trained(name)}
    kinds = {name.removeprefix("layers.0.") for name in moved if name.startswith("layers.0.")}
    assert kinds == {
        *(f"adapter.{part}.{kind}" for part in ("down", "up") for kind in ("weight", "bias")),
        *("attention_norm.weight", "ffn_norm.weight", "router.weight"),
    }
    assert {"norm.weight", "classifier.weight", "classifier.bias"} < moved
    assert loss(model) < worse


def test_what_the_routers_choose() -> None:
    """For single pixels: every layer's gates, and how many of the chosen ones have ink."""
    pixels = {**OF_IMAGES, "image": replace(OF_IMAGES["image"], channels=1, patch_height=1, patch_width=1)}
    single = tiny_coda(coda_config(**{**SETTINGS, **pixels}))
    for ink, expected in ((1.0, 1.0), (0.0, 0.0)):
        single.reduction = 2
        layers = routing(single, Rows(torch.full((2, 1, 8, 12), ink), torch.zeros(2)))
        assert [layer["ink"] for layer in layers] == [expected] * 2
        assert all(0 < layer["mean_gate"] <= 1 and 0 <= layer["gates_vanished"] <= 1 for layer in layers)
    single.reduction = 1
    assert routing(single, Rows(torch.zeros(2, 1, 8, 12), torch.zeros(2))) == []


def test_accuracy_is_of_the_highest_logit() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [0.0, 3.0]])
    assert accuracy(logits, Rows(torch.empty(4), torch.tensor([0, 1, 1, 1]))) == 0.75


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
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
    monkeypatch.setattr(training, "DENSE", {**DENSE, **SMALL})
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
