"""Losses over every exit: against labels, and against the teaching assistant's answers and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ....exporters.families.cost_eff.model import CostEffModel
from .batches import Batch


@dataclass(frozen=True)
class Pass:
    """One forward pass: ``states`` ``[B, S, H]`` after 0..L layers, ``logits`` ``[B, C]`` of every exit in order."""

    states: Sequence[torch.Tensor]
    logits: Sequence[torch.Tensor]


def forward(model: CostEffModel, batch: Batch) -> Pass:
    """States and logits of every exit for ``batch``."""
    states = model.hidden_states(batch.input_ids, batch.attention_mask)
    exits = model.architecture.exits.layers
    return Pass(states, [model.exit_logits(layer, states[layer], batch.attention_mask) for layer in exits])


def label_loss(model: CostEffModel, batch: Batch) -> torch.Tensor:
    """Cross-entropy against the labels, summed over the exits."""
    losses = [functional.cross_entropy(logits, batch.labels) for logits in forward(model, batch).logits]
    return torch.stack(losses).sum()


@dataclass(frozen=True)
class Distillation:
    """``L_pred + L_feat`` from ``teacher``, a model of the same depth and hidden size."""

    teacher: CostEffModel

    def __call__(self, model: CostEffModel, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            taught = forward(self.teacher, batch)
        own = forward(model, batch)
        return prediction_loss(taught, own) + feature_loss(taught, own, batch.attention_mask)


def prediction_loss(teacher: Pass, student: Pass) -> torch.Tensor:
    """``L_pred``: cross-entropy against the teacher's probabilities, exit to exit, at temperature 1."""
    pairs = zip(teacher.logits, student.logits, strict=True)
    return torch.stack([functional.cross_entropy(mine, theirs.softmax(-1)) for theirs, mine in pairs]).sum()


def feature_loss(teacher: Pass, student: Pass, mask: torch.Tensor) -> torch.Tensor:
    """``L_feat``: mean squared difference of every state, embeddings included, over real tokens alone."""
    real = mask.unsqueeze(-1).to(student.states[0].dtype)  # [B, S, 1]
    count = real.sum() * student.states[0].shape[-1]
    pairs = zip(teacher.states, student.states, strict=True)
    return torch.stack([((mine - theirs).square() * real).sum() / count for theirs, mine in pairs]).sum()
