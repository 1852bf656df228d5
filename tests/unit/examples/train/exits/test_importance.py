"""Taylor scores: nothing for what does nothing, and the order that the weights were built to have."""

from __future__ import annotations

import torch
from nestforge.examples.train.exits.batches import Batch, Rows
from nestforge.examples.train.exits.importance import taylor_importance
from nestforge.examples.train.exits.losses import label_loss
from nestforge.exporters.families.cost_eff.model import CostEffModel


def test_zeroed_structures_score_nothing(model: CostEffModel, rows: Rows) -> None:
    with torch.no_grad():
        model.encoder.layer[1].attention.output.dense.weight[:, 4:8] = 0  # head 1
        model.encoder.layer[2].intermediate.dense.weight[5] = 0
        model.encoder.layer[2].output.dense.weight[:, 5] = 0
    calls: list[tuple[int, int]] = []
    importance = taylor_importance(model, rows.in_order(8), lambda done, total: calls.append((done, total)))
    assert [layer.shape for layer in importance.heads] == [(4,)] * 3
    assert [layer.shape for layer in importance.ffn] == [(12,)] * 3
    assert [(layer == 0).nonzero().flatten().tolist() for layer in importance.heads] == [[], [1], []]
    assert [(layer == 0).nonzero().flatten().tolist() for layer in importance.ffn] == [[], [], [5]]
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_equal_heads_rank_by_the_size_of_their_output_columns(model: CostEffModel, rows: Rows) -> None:
    """Heads made alike, with output columns of size 3, 1, 4 and 2, must rank in that order."""
    attention = model.encoder.layer[0].attention
    with torch.no_grad():
        for part in (attention.self.query, attention.self.key, attention.self.value):
            part.weight.copy_(part.weight[:4].repeat(4, 1))
            part.bias.copy_(part.bias[:4].repeat(4))
        columns = attention.output.dense.weight[:, :4].clone()
        attention.output.dense.weight.copy_(torch.cat([size * columns for size in (3, 1, 4, 2)], 1))
    scores = taylor_importance(model, rows.in_order(8), lambda *_: None).heads[0]
    assert scores.argsort(descending=True).tolist() == [2, 0, 3, 1]
    torch.testing.assert_close(scores / scores[1], torch.tensor([3.0, 1.0, 4.0, 2.0]))


def test_the_score_is_the_mean_gradient_size_times_the_weight(model: CostEffModel, rows: Rows) -> None:
    batches: list[Batch] = rows.in_order(12)
    weight = model.encoder.layer[1].attention.output.dense.weight
    sizes = [torch.autograd.grad(label_loss(model, batch), weight)[0].abs() for batch in batches]
    expected = (torch.stack(sizes).mean(0) * weight.detach().abs()).sum(0).reshape(4, 4).sum(1)
    scores = taylor_importance(model, batches, lambda *_: None).heads[1]
    torch.testing.assert_close(scores, expected)
    assert all(parameter.grad is None for parameter in model.parameters())
