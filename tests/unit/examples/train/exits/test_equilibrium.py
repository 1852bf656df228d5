"""Gradient equilibrium is an average, and nothing of training stays behind."""

from __future__ import annotations

import torch
from nestforge.examples.train.exits.batches import Batch
from nestforge.examples.train.exits.equilibrium import dropout, gradient_equilibrium, scaled_gradient
from nestforge.examples.train.exits.losses import forward, label_loss
from nestforge.exporters.families.cost_eff.model import CostEffModel
from torch.nn import functional


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


def test_only_the_gradient_is_scaled() -> None:
    data = torch.tensor([1.0, 2.0], requires_grad=True)
    scaled = scaled_gradient(data, 0.25)
    assert torch.equal(scaled, data)
    scaled.sum().backward()
    assert data.grad is not None
    assert data.grad.tolist() == [0.25, 0.25]
