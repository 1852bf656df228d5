"""Accuracy, certainty and the baseline, on answers that are known."""

from __future__ import annotations

import torch
from nestforge.examples.train.exits.batches import Rows
from nestforge.examples.train.exits.evaluate import exit_quality, majority
from nestforge.exporters.families.cost_eff.model import CostEffModel


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
