"""Losses: sums over exits and states, and padding counts for nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from nestforge.examples.train.exits.batches import Batch, Rows
from nestforge.examples.train.exits.losses import Distillation, Pass, feature_loss, forward, label_loss, prediction_loss
from nestforge.exporters.families.cost_eff.model import CostEffModel
from torch.nn import functional


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
