"""What every training here shares: decay of matrices alone, warm-up, linear decay of the learning rate."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_WARM_UP = 0.1  # of the steps


def decay_groups(named: Iterable[tuple[str, torch.nn.Parameter]], rate: float, decay: float) -> list[dict[str, object]]:
    """Two parameter groups for an optimiser: matrices, which decay, and biases and norms, which do not."""
    parameters = list(named)
    groups: list[dict[str, object]] = []
    for decays in (True, False):
        chosen = [p for name, p in parameters if _is_matrix(name, p) == decays]
        groups.append({"params": chosen, "lr": rate, "weight_decay": decay if decays else 0.0})
    return groups


def linear_schedule(optimiser: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate over ``steps`` steps: up over the first tenth, then down in a line towards 0."""
    warm_up = max(1, round(_WARM_UP * steps))
    return torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))
    )


def parameters_of(model: torch.nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.ndim > 1 and "LayerNorm" not in name and not name.endswith("bias")
