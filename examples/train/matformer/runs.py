"""One run: the universal model, or a baseline of one level's size, from fresh weights to figures on held-out rows.

A run uses one thread, so it gives the same weights on any number of cores; runs go side by side instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ....exporters.families.matformer.architecture.config import NestedConfig
from ....exporters.families.matformer.folder import save_model
from ..optimiser import parameters_of
from ..side_by_side import one_thread
from ..stages import Record, replace_folder
from .fit import draw_levels, fit, quality
from .tasks import Task


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
