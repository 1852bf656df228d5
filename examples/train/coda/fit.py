"""Training of the dense model and of a task on the frozen base, and what a model is worth on images of the test."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional

from ....exporters.families.coda.architecture.shapes import is_of_task
from ....exporters.families.coda.model.encoder import CodaEncoder
from ..matformer.data import Rows
from ..optimiser import decay_groups, linear_schedule
from ..stages import Record
from .recipe import CLASSES, REDUCTIONS, Recipe

_BETAS = (0.9, 0.98)
_CLIP = 1.0  # norm of all gradients
_VANISHED = 1e-6  # of gates


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
    optimiser = torch.optim.AdamW(decay_groups(trained, rate, decay), betas=_BETAS, fused=True)
    schedule = linear_schedule(optimiser, steps)
    for batch in batches:
        optimiser.zero_grad()
        torch.autograd.backward(functional.cross_entropy(logits(batch.inputs), batch.targets))
        torch.nn.utils.clip_grad_norm_([parameter for _, parameter in trained], _CLIP)
        optimiser.step()
        schedule.step()


@torch.no_grad()
def accuracy(logits: torch.Tensor, rows: Rows) -> float:
    """Share of ``rows`` whose highest of ``logits`` [N, classes] is right."""
    return (logits.argmax(-1) == rows.targets).double().mean().item()


@torch.no_grad()
def routing(model: CodaEncoder, rows: Rows) -> list[Record]:
    """Of each layer at the model's reduction: the mean gate of selected tokens, the share of gates that vanish, and of
    the selected patches the share with ``ink``. Empty where all tokens pass."""
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
