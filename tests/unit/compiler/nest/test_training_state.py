from __future__ import annotations

from pathlib import Path

import torch
from nestforge.compiler.nest.training_state import load_state, save_state


def training() -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(3)) for name in ("a", "b", "never")}
    return weights, torch.optim.AdamW(weights.values(), lr=0.1, fused=True)


def step(weights: dict[str, torch.nn.Parameter], optimiser: torch.optim.Optimizer) -> None:
    optimiser.zero_grad()
    torch.autograd.backward((weights["a"].square() * weights["b"]).sum())
    optimiser.step()


def test_a_training_that_was_kept_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    weights, optimiser = training()
    for _ in range(3):
        step(weights, optimiser)
    save_state(tmp_path / "state", weights, optimiser, 3, 1.5)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    others, other = training()
    assert load_state(tmp_path / "state", others, other) == (3, 1.5)
    step(weights, optimiser)
    step(others, other)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_without_a_file_a_training_begins(tmp_path: Path) -> None:
    weights, optimiser = training()
    before = weights["a"].detach().clone()
    assert load_state(tmp_path / "state", weights, optimiser) == (0, 0.0)
    assert torch.equal(weights["a"], before)
