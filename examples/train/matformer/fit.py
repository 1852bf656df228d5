"""Training of one model: at every step one level for all layers, and what that level computes is what learns.

A step at a level is an ordinary step of AdamW over all parameters. Neurons that the level does not have get a gradient
of zero, so AdamW goes on: their moments fade towards zero (and move them meanwhile), and weight decay shrinks
them. Nothing is masked, averaged or distilled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import repeat

import torch
from torch.nn import functional

from ..optimiser import decay_groups, linear_schedule
from .data import Data, Rows
from .recipe import Recipe
from .tasks import Task

_BETAS = (0.9, 0.95)
_CLIP = 1.0  # norm of all gradients
_BATCH = 64  # rows of an evaluation


def draw_levels(recipe: Recipe, full: int, seed: int) -> list[int]:
    """The width of every step of the universal model, drawn independently with the recipe's probabilities."""
    chance = random.Random(seed)  # noqa: S311  (levels of training, no secret)
    widths = list(recipe.widths(full).values())
    return chance.choices(widths, weights=recipe.probabilities, k=recipe.universal_steps)


def fit(
    task: Task,
    model: torch.nn.Module,
    data: Data,
    steps: int,
    seed: int,
    levels: Sequence[int] | None = None,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Trains ``model`` in place for ``steps`` steps, each at its width of ``levels``, by default at the full one."""
    recipe = task.recipe
    groups = decay_groups(model.named_parameters(), recipe.rate, recipe.decay)
    optimiser = torch.optim.AdamW(groups, betas=_BETAS, fused=True)
    schedule = linear_schedule(optimiser, steps)
    pairs = zip(data.batches(recipe.batch, steps, seed), levels or repeat(None, steps), strict=True)
    for step, (batch, width) in enumerate(pairs, start=1):
        optimiser.zero_grad()
        torch.autograd.backward(loss(task, model, batch, _everywhere(task, width)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimiser.step()
        schedule.step()
        on_step(step, steps)


def loss(task: Task, model: torch.nn.Module, rows: Rows, widths: Sequence[int] | None = None) -> torch.Tensor:
    """Mean cross-entropy in nats of ``rows`` at ``widths``, one a layer."""
    logits = task.logits(model, rows.inputs, widths)
    return functional.cross_entropy(logits.flatten(0, -2), rows.targets.flatten())


@torch.no_grad()
def quality(task: Task, model: torch.nn.Module, rows: Rows, widths: Sequence[int] | None = None) -> dict[str, float]:
    """``loss`` (nats) and ``accuracy`` of the likeliest answer, over all ``rows``."""
    nats, right = 0.0, 0
    for at in range(0, len(rows.targets), _BATCH):
        targets = rows.targets[at : at + _BATCH].flatten()
        logits = task.logits(model, rows.inputs[at : at + _BATCH], widths).flatten(0, -2)
        nats += functional.cross_entropy(logits, targets, reduction="sum").item()
        right += int((logits.argmax(-1) == targets).sum())
    return {"loss": nats / rows.targets.numel(), "accuracy": right / rows.targets.numel()}


def _everywhere(task: Task, width: int | None) -> list[int] | None:
    return None if width is None else [width] * task.config.num_hidden_layers
