from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nestforge.examples.byte_windows import Rows
from nestforge.examples.coda.fit import accuracy, fit_task, is_trained, routing
from nestforge.examples.coda.train import RECIPE
from nestforge.exporters.families.coda.model import CodaEncoder
from support.tiny_coda import OF_IMAGES, coda_config, tiny_coda

TINY = replace(RECIPE, task_steps=12, task_rate=5e-3, batch=8)
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
    fit_task(model, [rows()] * TINY.task_steps, TINY, 0)
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
