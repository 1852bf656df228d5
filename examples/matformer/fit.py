"""Training of one model: at every step one level for all layers, and what that level computes is what learns.

A step at a level is an ordinary step of AdamW over all parameters. Neurons that the level does not have get a gradient
of zero, so AdamW goes on: their moments fade towards zero (and move them meanwhile), and weight decay shrinks
them. Nothing is masked, averaged or distilled.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
from torch.nn import functional

from ...exporters.checkpoints.own_folder import save_model
from ...exporters.families.matformer.config import NestedConfig
from ..byte_windows import PythonBytes, Rows
from ..training import Record, decay_groups, descend, one_thread, parameters_of, quality_of, replace_folder
from .recipe import Recipe
from .tasks import Digits, Task

_BETAS = (0.9, 0.95)
_BATCH = 64  # rows of an evaluation


def draw_levels(recipe: Recipe, full: int, seed: int) -> list[int]:
    """The width of every step of the universal model, drawn independently with the recipe's probabilities."""
    chance = random.Random(seed)  # noqa: S311  (levels of training, no secret)
    widths = list(recipe.widths(full).values())
    return chance.choices(widths, weights=recipe.probabilities, k=recipe.universal_steps)


def fit(
    task: Task,
    model: torch.nn.Module,
    data: PythonBytes | Digits,
    steps: int,
    seed: int,
    levels: Sequence[int] | None = None,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Trains ``model`` in place for ``steps`` steps, each at its width of ``levels``, by default at the full one."""
    recipe = task.recipe
    groups = decay_groups(model.named_parameters(), recipe.rate, recipe.decay)
    pairs = zip(data.batches(recipe.batch, steps, seed), levels or repeat(None, steps), strict=True)
    losses = (partial(loss, task, model, batch, _everywhere(task, width)) for batch, width in pairs)
    descend(groups, _BETAS, losses, steps, on_step)


def loss(task: Task, model: torch.nn.Module, rows: Rows, widths: Sequence[int] | None = None) -> torch.Tensor:
    """Mean cross-entropy in nats of ``rows`` at ``widths``, one a layer."""
    logits = task.logits(model, rows.inputs, widths)
    return functional.cross_entropy(logits.flatten(0, -2), rows.targets.flatten())


@torch.no_grad()
def quality(task: Task, model: torch.nn.Module, rows: Rows, widths: Sequence[int] | None = None) -> Record:
    """``loss`` (nats) and ``accuracy`` of the likeliest answer, over all ``rows``."""
    return quality_of((task.logits(model, part.inputs, widths), part.targets) for part in rows.parts(_BATCH))


def _everywhere(task: Task, width: int | None) -> list[int] | None:
    return None if width is None else [width] * task.config.num_hidden_layers


@dataclass(frozen=True)
class Run:
    """``level`` is None for the universal model; ``folder`` is where the model is published, if it is."""

    seed: int
    level: str | None = None
    folder: Path | None = None

    @property
    def name(self) -> str:
        return f"seed {self.seed}: {self.level or 'universal'}"


def full_width(config: NestedConfig) -> int:
    """FFN neurons of every layer of a universal model."""
    (width,) = set(config.widths)
    return width


def baseline_config(task: Task, level: str) -> NestedConfig:
    """A plain model with the width of ``level`` in every layer."""
    width = task.recipe.widths(full_width(task.config))[level]
    return replace(task.config, intermediate_size=width, nested=False, granularities=None)


def train(task: Task, run: Run) -> Record:
    """Trains and measures. The record has ``seconds`` of training alone and the figures of each level by its name."""
    with one_thread():
        data = task.data()
        config = task.config if run.level is None else baseline_config(task, run.level)
        torch.manual_seed(run.seed)
        model = task.model(config)
        started = time.perf_counter()
        if run.level is None:
            drawn = draw_levels(task.recipe, full_width(config), run.seed)
            fit(task, model, data, len(drawn), run.seed, drawn)
            widths = task.recipe.widths(full_width(config))
        else:
            fit(task, model, data, task.recipe.steps, run.seed)
            widths = {run.level: full_width(config)}
        seconds = round(time.perf_counter() - started, 1)
        if run.folder is not None:
            replace_folder(run.folder, lambda beside: save_model(model, config, beside, task.extra_files()))
        layers = config.num_hidden_layers
        levels = {
            name: {
                "width": width,
                "validation": quality(task, model, data.validation, [width] * layers),
                "test": quality(task, model, data.test, [width] * layers),
            }
            for name, width in widths.items()
        }
    return {"parameters": parameters_of(model), "seconds": seconds, "levels": levels}
