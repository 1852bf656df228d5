"""One stretch of training: AdamW, warm-up, linear decay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ....exporters.families.cost_eff.model import CostEffModel
from ..optimiser import decay_groups, linear_schedule
from .batches import Batch
from .equilibrium import dropout, gradient_equilibrium

_DECAY = 0.01  # of matrices; biases and LayerNorms do not decay
_CLIP = 1.0  # norm of all gradients


@dataclass(frozen=True)
class Stretch:
    """``steps`` batches at a peak learning rate for the body and one for the exits."""

    steps: int
    rate: float
    exit_rate: float
    dropout: float = 0.0


def fit(
    model: CostEffModel,
    batches: Sequence[Batch],
    loss: Callable[[CostEffModel, Batch], torch.Tensor],
    stretch: Stretch,
    on_step: Callable[[int, int], None],
) -> None:
    """Trains ``model`` in place, one step a batch, gradients in equilibrium over the exits."""
    optimiser = torch.optim.AdamW(_groups(model, stretch), fused=True)
    steps = len(batches)
    schedule = linear_schedule(optimiser, steps)
    with gradient_equilibrium(model), dropout(model, stretch.dropout):
        for step, batch in enumerate(batches):
            optimiser.zero_grad()
            torch.autograd.backward(loss(model, batch))
            torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
            optimiser.step()
            schedule.step()
            on_step(step + 1, steps)


def _groups(model: CostEffModel, stretch: Stretch) -> list[dict[str, object]]:
    groups = []
    for rate, of_exits in ((stretch.rate, False), (stretch.exit_rate, True)):
        named = [(n, p) for n, p in model.named_parameters() if n.startswith("exits.") == of_exits]
        groups += decay_groups(named, rate, _DECAY)
    return groups
