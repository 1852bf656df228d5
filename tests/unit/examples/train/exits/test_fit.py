"""A stretch of training learns, tells its steps and leaves no hook."""

from __future__ import annotations

import torch
from nestforge.examples.train.exits.batches import Rows
from nestforge.examples.train.exits.evaluate import exit_quality
from nestforge.examples.train.exits.fit import Stretch, fit
from nestforge.examples.train.exits.losses import forward, label_loss
from nestforge.exporters.families.cost_eff.model import CostEffModel


def test_every_exit_learns_a_learnable_task(model: CostEffModel) -> None:
    rows = Rows([[1, 5 + n % 3, 2 + n % 2] for n in range(48)], [n % 3 for n in range(48)], pad=0)
    torch.manual_seed(0)
    steps: list[tuple[int, int]] = []
    stretch = Stretch(steps=40, rate=5e-3, exit_rate=2e-2, dropout=0.1)
    fit(model, rows.shuffled(8, 40, 0), label_loss, stretch, lambda done, total: steps.append((done, total)))
    assert steps == [(step, 40) for step in range(1, 41)]
    assert [quality.accuracy for quality in exit_quality(model, rows)] == [1.0, 1.0, 1.0]
    batch = rows.batch(range(4))
    assert torch.equal(forward(model, batch).logits[0], forward(model, batch).logits[0])  # dropout is gone


def test_the_same_seed_gives_the_same_weights(model: CostEffModel, rows: Rows) -> None:
    weights = {name: data.clone() for name, data in model.state_dict().items()}
    results = []
    for _ in range(2):
        model.load_state_dict(weights)
        torch.manual_seed(7)
        fit(model, rows.shuffled(8, 3, 0), label_loss, Stretch(3, 1e-2, 1e-2, 0.3), lambda *_: None)
        results.append({name: data.clone() for name, data in model.state_dict().items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in weights)
    assert any(not torch.equal(results[0][name], weights[name]) for name in weights)


def test_exits_and_body_have_rates_of_their_own(model: CostEffModel, rows: Rows) -> None:
    before = {name: data.clone() for name, data in model.state_dict().items()}
    fit(model, rows.shuffled(8, 2, 0), label_loss, Stretch(2, 0.0, 1e-2), lambda *_: None)
    changed = {name for name, data in model.state_dict().items() if not torch.equal(data, before[name])}
    assert changed == {name for name in before if name.startswith("exits.")}
