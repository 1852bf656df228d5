"""A stretch of training, and the comparison of ``make demo-exits`` on the golden bundle with three exits."""

import copy
from pathlib import Path

import nestforge
import numpy as np
import pytest
import torch
from nestforge.examples.cost_eff.fit import (
    Distillation,
    Pass,
    Stretch,
    dropout,
    exit_quality,
    feature_loss,
    fit,
    forward,
    gradient_equilibrium,
    label_loss,
    majority,
    prediction_loss,
)
from nestforge.examples.cost_eff.report import exit_report
from nestforge.examples.cost_eff.texts import Batch, Rows, Text
from nestforge.exporters.families.cost_eff.model import CostEffModel
from nestforge.tables import Table
from torch.nn import functional


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


def test_exits_and_body_have_rates_of_their_own(model: CostEffModel, rows: Rows) -> None:
    before = {name: data.clone() for name, data in model.state_dict().items()}
    fit(model, rows.shuffled(8, 2, 0), label_loss, Stretch(2, 0.0, 1e-2), lambda *_: None)
    changed = {name for name, data in model.state_dict().items() if not torch.equal(data, before[name])}
    assert changed == {name for name in before if name.startswith("exits.")}


def gradients_of_each_exit(model: CostEffModel, batch: Batch) -> list[dict[str, torch.Tensor]]:
    per_exit = []
    for index in range(model.architecture.exits.layers[-1]):
        model.zero_grad()
        functional.cross_entropy(forward(model, batch).logits[index], batch.labels).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        per_exit.append({name: grad.clone() for name, grad in grads.items()})
    model.zero_grad()
    return per_exit


def test_every_layer_gets_the_mean_of_the_exits_behind_it(model: CostEffModel, batch: Batch) -> None:
    alone = gradients_of_each_exit(model, batch)
    with gradient_equilibrium(model):
        label_loss(model, batch).backward()
    for name, parameter in model.named_parameters():
        reached = [grads[name] for grads in alone if name in grads]
        if name.startswith("exits."):
            assert len(reached) == 1
        elif name.startswith("encoder.layer."):
            assert len(reached) == 3 - int(name.split(".")[2])
        else:
            assert len(reached) == 3
        torch.testing.assert_close(parameter.grad, torch.stack(reached).mean(0), rtol=1e-4, atol=1e-6)


def test_forward_is_untouched_and_hooks_are_gone_afterwards(model: CostEffModel, batch: Batch) -> None:
    before = forward(model, batch)
    with gradient_equilibrium(model):
        inside = forward(model, batch)
    label_loss(model, batch).backward()
    plain = model.encoder.layer[0].output.dense.weight.grad.clone()
    expected = sum(grads["encoder.layer.0.output.dense.weight"] for grads in gradients_of_each_exit(model, batch))
    assert torch.equal(torch.stack(before.logits), torch.stack(inside.logits))
    torch.testing.assert_close(plain, expected)


def test_dropout_lasts_as_long_as_its_block(model: CostEffModel, batch: Batch) -> None:
    before = forward(model, batch)
    with dropout(model, 0.5):
        first, second = forward(model, batch), forward(model, batch)
    assert not torch.equal(first.states[0], second.states[0])
    assert (first.states[0] == 0).any()
    with dropout(model, 0.0):
        assert torch.equal(forward(model, batch).logits[0], before.logits[0])
    assert torch.equal(forward(model, batch).logits[2], before.logits[2])


def test_the_label_loss_sums_over_the_exits(model: CostEffModel, batch: Batch) -> None:
    each = [functional.cross_entropy(logits, batch.labels).item() for logits in forward(model, batch).logits]
    assert len(each) == 3
    assert label_loss(model, batch).item() == pytest.approx(sum(each))


def test_features_are_compared_over_real_tokens_alone() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    taught = [torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)]
    padding = torch.full((2, 3, 4), 100.0) * (1 - mask[:, :, None])
    own = [padding + 0.0, padding + 2.0 * mask[:, :, None]]
    assert feature_loss(Pass(taught, []), Pass(own, []), mask).item() == pytest.approx(4.0)


def test_the_prediction_loss_is_least_at_the_teachers_own_answer() -> None:
    taught = Pass([], [torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[0.0, 1.0, 0.0]])])
    entropies = [-(p * p.log()).sum().item() for p in (logits.softmax(-1) for logits in taught.logits)]
    assert prediction_loss(taught, taught).item() == pytest.approx(sum(entropies))
    other = Pass([], [logits + torch.tensor([0.5, 0.0, 0.0]) for logits in taught.logits])
    assert prediction_loss(taught, other).item() > sum(entropies)


def test_distillation_does_not_depend_on_the_length_of_padding(model: CostEffModel, rows: Rows) -> None:
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight *= 1.5
    tight = rows.batch([0, 1])
    wide = Batch(*(functional.pad(data, (0, 2)) for data in (tight.input_ids, tight.attention_mask)), tight.labels)
    loss = Distillation(teacher)
    torch.testing.assert_close(loss(model, wide), loss(model, tight))
    loss(model, tight).backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert model.encoder.layer[0].output.dense.weight.grad is not None


def test_constant_exits(model: CostEffModel) -> None:
    with torch.no_grad():
        for layer, bias in (("1", [9.0, 0.0, 0.0]), ("2", [0.0, 0.0, 0.0]), ("3", [0.0, 0.0, 9.0])):
            model.exits[layer].weight.zero_()
            model.exits[layer].bias.copy_(torch.tensor(bias))
    first, flat, last = exit_quality(model, Rows([[1, 2]] * 70, [0] * 49 + [2] * 21, pad=0))
    assert (first.layer, first.accuracy, first.certain_share, first.certain_accuracy) == (1, 0.7, 1.0, 0.7)
    assert (flat.layer, flat.entropy, flat.certain_share, flat.certain_accuracy) == (2, 1.0986, 0.0, None)
    assert (last.layer, last.accuracy, last.certain_accuracy) == (3, 0.3, 0.3)


def test_majority_is_that_of_the_training_part() -> None:
    assert majority([2, 1, 2, 0], [1, 1, 1, 2]) == 0.25
    assert majority([1, 0, 1, 0], [0, 0, 1]) == 0.6667


BUNDLE = Path(__file__).parents[3] / "golden" / "bundle-exits"
TEXTS = ["the quick brown fox", "jumps over", "the lazy dog", "fox", "the the the dog", "quick brown dog jumps"]


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    """Labelled with what the exit after layer 3 says, so that it alone is always right."""
    with nestforge.load(BUNDLE, threads=1) as model:
        labels = np.concatenate([model(text, submodel="depth3", exits="off")["logits"].argmax(1) for text in TEXTS])
    return dict(exit_report(BUNDLE, list(map(Text, TEXTS, labels.tolist()))))


def test_each_exit_alone(tables: dict[str, Table]) -> None:
    table = tables["Accuracy of each exit, if every text leaves there"]
    assert [row[0] for row in table.rows] == ["exit after layer 1", "exit after layer 3", "exit after layer 4"]
    assert table.rows[1][1] == "100.0"
    assert [row[-1] for row in table.rows] == ["100 0 0", "0 100 0", "0 0 100"]
    flops = [int(row[4]) for row in table.rows]
    assert flops[0] < flops[1] < flops[2] == 100


def test_the_sweep_goes_from_nobody_to_everybody(tables: dict[str, Table]) -> None:
    table = tables["One threshold for every exit"]
    assert table.columns[-1] == "% leaving after layer 1 3 4"
    assert table.rows[0][-1] == "0 0 100", "no entropy is exactly 0"
    assert table.rows[-1][-1] == "100 0 0", "none is above ln C"
    depths = [
        sum(int(share) * layer for share, layer in zip(row[-1].split(), (1, 3, 4), strict=True)) for row in table.rows
    ]
    assert depths == sorted(depths, reverse=True)


def test_the_whole_engine_is_the_reference(tables: dict[str, Table]) -> None:
    (row,) = tables["Calibrated, and without exits"].rows
    assert (row[0], row[3], row[4], row[5]) == ("whole engine", "100", "100", "0 0 100")
