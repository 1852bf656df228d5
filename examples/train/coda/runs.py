"""One run: a task on the frozen base, from the converted folder to figures on images that nothing was trained on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....compiler.convert_coda import convert_coda
from ....exporters.checkpoints.offline_transformers import offline_transformers
from ....exporters.families.coda.architecture.config import KeysOf
from ....exporters.families.coda.folder import load_model, save_model
from ....exporters.families.coda.task_folder import save_task
from ..matformer.data import Rows
from ..matformer.digits import Digits, read_digits
from ..side_by_side import one_thread
from ..stages import Record, replace_folder
from .fit import DenseClassifier, accuracy, fit_dense, fit_task, is_trained, routing
from .recipe import REDUCTIONS, TASKS, Recipe, conversion


@dataclass(frozen=True)
class Run:
    """``task`` on the base in folder ``base``, published whole in ``folder``, and by itself beside it."""

    task: str
    keys_of: KeysOf
    base: Path
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.task}-{self.keys_of}"

    @property
    def alone(self) -> Path:
        """The folder of the task without what is frozen."""
        return self.folder.with_name(f"{self.folder.name}-task")


def of_task(task: str, rows: Rows) -> Rows:
    """``rows`` as ``task`` shows them."""
    return Rows(rows.inputs.rot90(2, (-2, -1)), rows.targets) if task == TASKS[1] else rows


@dataclass(frozen=True)
class Trainer:
    """Trains the dense model and any run by the ``recipe``."""

    recipe: Recipe

    def dense(self, shape: dict[str, Any], folder: Path) -> Record:
        """Trains a ViT of transformers on upright digits, with a classifier of the mean of its states, and publishes
        the ViT. The record has their accuracy on each task's test images, also of the task that they never saw."""
        transformers, data = offline_transformers(), read_digits()
        transformers.utils.logging.disable_progress_bar()
        with one_thread():
            torch.manual_seed(0)
            encoder = transformers.ViTModel(transformers.ViTConfig(**shape), add_pooling_layer=False)
            model = DenseClassifier(encoder, shape["hidden_size"]).train()
            started = time.process_time()
            fit_dense(model, data.batches(self.recipe.batch, self.recipe.dense_steps, 0), self.recipe)
            seconds = round(time.process_time() - started, 1)
        model.eval().requires_grad_(False)
        replace_folder(folder, encoder.save_pretrained)
        tests = {task: of_task(task, data.test) for task in TASKS}
        return {
            "seconds": seconds,
            "accuracy": {task: accuracy(model(rows.inputs), rows) for task, rows in tests.items()},
            "commonest": data.test.targets.bincount().max().item() / len(data.test.targets),
        }

    def convert(self, dense: Path, keys_of: KeysOf, folder: Path) -> Record:
        """The base of all tasks with these keys."""
        report = convert_coda(dense, folder, conversion(self.recipe, keys_of))
        return {"parameters": report.parameters, "groups": report.groups}

    def __call__(self, run: Run) -> Record:
        """Trains and measures. The record has, of each reduction, the accuracy on the test images and what ``routing``
        says of each layer; the ``seconds`` of a core that training took; how many numbers were ``trained``; and the
        share of the test's patches that have ``ink``."""
        with one_thread():
            data, model = read_digits(), load_model(run.base)
            started = time.process_time()
            fit_task(model.train(), _batches(data, run.task, self.recipe), self.recipe, 0)
            seconds = round(time.process_time() - started, 1)
            model.eval().requires_grad_(False)
            replace_folder(run.folder, lambda beside: save_model(model, model.config, beside))
            replace_folder(run.alone, lambda beside: save_task(run.folder, run.base, beside))
            rows = of_task(run.task, data.test)
            found = []
            for reduction in REDUCTIONS:
                model.reduction = reduction
                right, layers = accuracy(model(rows.inputs), rows), routing(model, rows)
                found.append({"reduction": reduction, "accuracy": right, "layers": layers})
        trained = sum(p.numel() for name, p in model.named_parameters() if is_trained(name))
        return {
            "seconds": seconds,
            "trained": trained,
            "ink": (rows.inputs > 0).double().mean().item(),
            "reductions": found,
        }


def _batches(data: Digits, task: str, recipe: Recipe) -> Iterator[Rows]:
    return (of_task(task, batch) for batch in data.batches(recipe.batch, recipe.task_steps, 1))
