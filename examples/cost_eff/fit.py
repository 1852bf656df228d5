"""Steps of the multi-exit training: losses, gradient equilibrium, dropout, and how good every exit is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ...exporters.families.cost_eff.model import CostEffModel, entropy
from ..training import decay_groups, descend
from .texts import Batch, Rows

_DECAY = 0.01  # of matrices; biases and LayerNorms do not decay
_BETAS = (0.9, 0.999)
_BATCH = 64
_CERTAIN_ENTROPY = 0.3  # nats: about 0.93 on one class


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
    losses = (partial(loss, model, batch) for batch in batches)
    with gradient_equilibrium(model), dropout(model, stretch.dropout):
        descend(_groups(model, stretch), _BETAS, losses, len(batches), on_step)


def _groups(model: CostEffModel, stretch: Stretch) -> list[dict[str, object]]:
    groups = []
    for rate, of_exits in ((stretch.rate, False), (stretch.exit_rate, True)):
        named = [(n, p) for n, p in model.named_parameters() if n.startswith("exits.") == of_exits]
        groups += decay_groups(named, rate, _DECAY)
    return groups


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


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def scaled_gradient(data: torch.Tensor, factor: float) -> torch.Tensor:
    """``data`` itself; its gradient is multiplied by ``factor``."""
    scaled: torch.Tensor = _ScaledGradient.apply(data, factor)  # type: ignore[no-untyped-call]  # torch has no types
    return scaled


@contextmanager
def gradient_equilibrium(model: CostEffModel) -> Iterator[None]:
    """Every layer ``k`` of ``L`` gets the mean, not the sum, of the gradients of the exits ``k..L``.

    Its output's gradient is scaled by ``1 / (L - k + 1)`` ahead of the exit, and the path onward by ``L - k``. The
    states that ``hidden_states`` returns lie between the two, so any loss on them is averaged like an exit's. The
    embeddings get the mean over all exits, the exits themselves their own gradient.
    """
    layers = model.encoder.layer
    depth = len(layers)

    def ahead(factor: float) -> Callable[..., torch.Tensor]:
        return lambda _module, _inputs, output: scaled_gradient(output, factor)

    def onward(factor: float) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda _module, inputs: (scaled_gradient(inputs[0], factor), *inputs[1:])

    with ExitStack() as hooks:
        for k, layer in enumerate(layers, start=1):
            hooks.callback(layer.register_forward_hook(ahead(1 / (depth - k + 1))).remove)
            if k > 1:
                hooks.callback(layer.register_forward_pre_hook(onward(depth - k + 1)).remove)
        yield


@contextmanager
def dropout(model: CostEffModel, rate: float) -> Iterator[None]:
    """Dropout on the embeddings and on what an exit reads. Drawing random numbers inside every layer too would make a
    step on a CPU more than half as long again."""

    def drop_output(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, rate)

    def drop_input(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (functional.dropout(inputs[0], rate),)

    with ExitStack() as hooks:
        hooks.callback(model.embeddings.register_forward_hook(drop_output).remove)
        for head in model.exits.values():
            hooks.callback(head.register_forward_pre_hook(drop_input).remove)
        yield


@dataclass(frozen=True)
class ExitQuality:
    """One exit: accuracy, mean entropy in nats, the share of texts with an entropy of at most 0.3 nats and the
    accuracy on those (None if there are none)."""

    layer: int
    accuracy: float
    entropy: float
    certain_share: float
    certain_accuracy: float | None


@torch.no_grad()
def exit_quality(model: CostEffModel, rows: Rows) -> list[ExitQuality]:
    """Quality of every exit on ``rows``, each text answered by every exit."""
    right: list[list[torch.Tensor]] = []
    uncertain: list[list[torch.Tensor]] = []
    for batch in rows.in_order(_BATCH):
        logits = forward(model, batch).logits
        right.append([answer.argmax(-1) == batch.labels for answer in logits])
        uncertain.append([entropy(answer) for answer in logits])
    columns = zip(model.architecture.exits.layers, zip(*right, strict=True), zip(*uncertain, strict=True), strict=True)
    return [_quality(layer, torch.cat(hits), torch.cat(nats)) for layer, hits, nats in columns]


def _quality(layer: int, right: torch.Tensor, nats: torch.Tensor) -> ExitQuality:
    certain = right[nats <= _CERTAIN_ENTROPY]
    return ExitQuality(
        layer,
        round(right.float().mean().item(), 4),
        round(nats.mean().item(), 4),
        round(len(certain) / len(right), 4),
        round(certain.float().mean().item(), 4) if len(certain) else None,
    )


def majority(train: Sequence[int], held_out: Sequence[int]) -> float:
    """Accuracy on ``held_out`` of always answering the commonest label of ``train``, the lowest of equals."""
    commonest = max(sorted(set(train)), key=list(train).count)
    return round(list(held_out).count(commonest) / len(held_out), 4)
