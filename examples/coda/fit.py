"""Training of a dense ViT, and of tasks on its frozen conditional form: recipe, data, steps and figures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ...compiler.convert_coda import convert_coda
from ...exporters.checkpoints.config import offline_transformers
from ...exporters.checkpoints.own_folder import save_model
from ...exporters.families.coda.config import KeysOf
from ...exporters.families.coda.model import CodaEncoder, load_model
from ...exporters.families.coda.ops import is_of_task
from ...exporters.families.coda.tasks import save_task
from ...profiles.nest_request import ConversionSettings
from ..byte_windows import Rows
from ..matformer.tasks import read_digits
from ..training import Record, decay_groups, descend, one_thread, replace_folder, seconds_of

# A task's images: those of the data set, or each turned by half a circle.
TASKS = ("upright", "upside-down")
KEYS: tuple[KeysOf, ...] = ("selected", "all")
REDUCTIONS = (8, 5, 3, 2, 1)
CLASSES = 10
_BETAS = (0.9, 0.98)
_VANISHED = 1e-6  # of gates


@dataclass(frozen=True)
class Recipe:
    """Steps of AdamW over ``batch`` images: ``dense_steps`` of the dense model, ``task_steps`` of each task, which
    draws a reduction for every step."""

    dense_steps: int
    dense_rate: float
    task_steps: int
    task_rate: float
    batch: int
    decay: float
    adapter_size: int


RECIPE = Recipe(
    dense_steps=3000, dense_rate=1e-3, task_steps=2500, task_rate=3e-3, batch=32, decay=0.05, adapter_size=32
)
# A ViT of single pixels, so that there are tokens to choose among. Drawn as wide as its width asks for: at the 0.02 of
# larger models 600 steps gave 64 % on the test, and at this 400 gave 85 %.
DENSE: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "image_size": 8,
    "patch_size": 1,
    "num_channels": 1,
    "initializer_range": 0.1,
}


def conversion(recipe: Recipe, keys_of: KeysOf) -> ConversionSettings:
    """How the dense model becomes the base of all tasks."""
    return ConversionSettings(
        adapter_size=recipe.adapter_size, keys_of=keys_of, reduction=3, reductions=REDUCTIONS, num_labels=CLASSES
    )


class DenseClassifier(torch.nn.Module):
    """``encoder``, a ViT of transformers, and logits of the mean of its last states, as conditional encoders answer."""

    def __init__(self, encoder: Any, hidden: int) -> None:
        super().__init__()
        self.encoder, self.classifier = encoder, torch.nn.Linear(hidden, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``images`` [N, 1, 8, 8] to [N, classes]."""
        logits: torch.Tensor = self.classifier(self.encoder(pixel_values=images).last_hidden_state.mean(1))
        return logits


def fit_dense(model: DenseClassifier, batches: Iterable[Rows], recipe: Recipe) -> None:
    """Trains all of ``model``, one step a batch."""
    _fit(model, batches, recipe.dense_steps, recipe.dense_rate, recipe.decay, model)


def fit_task(model: CodaEncoder, batches: Iterable[Rows], recipe: Recipe, seed: int) -> None:
    """Trains what a task has of its own, adapters, routers, scales of norms and the classifier, each batch at a
    reduction that ``seed`` draws."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
    chance = random.Random(seed)  # noqa: S311  (no secret)

    def logits(images: torch.Tensor) -> torch.Tensor:
        model.reduction = chance.choice(REDUCTIONS)
        answer: torch.Tensor = model(images)
        return answer

    _fit(model, batches, recipe.task_steps, recipe.task_rate, recipe.decay, logits)


def is_trained(parameter: str) -> bool:
    """Whether a task trains it: of norms the scales alone, as the paper does."""
    return is_of_task(parameter) and not parameter.endswith("norm.bias")


def _fit(
    model: torch.nn.Module,
    batches: Iterable[Rows],
    steps: int,
    rate: float,
    decay: float,
    logits: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    losses = (partial(_loss, logits, batch) for batch in batches)
    descend(decay_groups(trained, rate, decay), _BETAS, losses, steps)


def _loss(logits: Callable[[torch.Tensor], torch.Tensor], batch: Rows) -> torch.Tensor:
    return functional.cross_entropy(logits(batch.inputs), batch.targets)


@torch.no_grad()
def accuracy(logits: torch.Tensor, rows: Rows) -> float:
    """Share of ``rows`` whose highest of ``logits`` [N, classes] is right."""
    return (logits.argmax(-1) == rows.targets).double().mean().item()


@torch.no_grad()
def routing(model: CodaEncoder, rows: Rows) -> list[Record]:
    """Gates of each layer at the model's reduction: the mean gate of selected tokens, the share of gates that vanish,
    and of the selected patches the share with ``ink``. Empty where all tokens pass."""
    _, found = model.routed(rows.inputs)
    image = model.config.image
    assert image is not None
    has_ink = torch.nn.functional.pad(rows.inputs.flatten(1) > 0, (image.front_tokens, 0))  # [N, n]
    layers = []
    for layer in sorted(found):
        gates, chosen = found[layer].gates, found[layer].chosen
        patches = chosen >= image.front_tokens
        layers.append(
            {
                "mean_gate": gates.double().mean().item(),
                "gates_vanished": (gates < _VANISHED).double().mean().item(),
                "ink": has_ink.gather(1, chosen)[patches].double().mean().item(),
            }
        )
    return layers


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
            model = DenseClassifier(encoder, shape["hidden_size"])
            batches = data.batches(self.recipe.batch, self.recipe.dense_steps, 0)
            seconds = seconds_of(model, lambda: fit_dense(model, batches, self.recipe))
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
            batches = (of_task(run.task, batch) for batch in data.batches(self.recipe.batch, self.recipe.task_steps, 1))
            seconds = seconds_of(model, lambda: fit_task(model, batches, self.recipe, 0))
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
