"""Decay of matrices alone, and a learning rate that rises for a tenth and then falls."""

from __future__ import annotations

import pytest
import torch
from nestforge.examples.train.optimiser import decay_groups, linear_schedule, parameters_of


def test_matrices_decay_and_nothing_else() -> None:
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(3, 4), "up": torch.nn.Linear(4, 5)})
    matrices, others = decay_groups(model.named_parameters(), rate=0.5, decay=0.1)
    assert matrices == {
        "params": [model["embedding"].weight, model["up"].weight],
        "lr": 0.5,
        "weight_decay": 0.1,
    }
    assert others == {"params": [model["up"].bias], "lr": 0.5, "weight_decay": 0.0}
    assert parameters_of(model) == 3 * 4 + 4 * 5 + 5


def test_the_rate_rises_for_a_tenth_and_falls_to_the_end() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    schedule = linear_schedule(optimiser, 20)
    rates = []
    for _ in range(20):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    assert rates == pytest.approx([0.5, 1.0, *(n / 18 for n in range(18, 0, -1))])
