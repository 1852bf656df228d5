"""Nested self-distillation: the frozen original teaches the universal model and its levels, which share its weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import CheckpointError
from ...exporters.sentence_transformers.read_modules import HEAD
from ...exporters.universal import UniversalModel
from ..planning.levels import Level
from ..work.clock import Clock
from ..work.staging import Stage
from .difference import difference
from .texts import TextBatches
from .training_state import load_state, save_state
from .watched import NestedPasses, blocks_of, run

BATCH = 16  # texts
_LEARNING_RATE = 3e-4  # AdamW's, at its highest
_BETAS = (0.9, 0.99)
_WARM_UP_SHARE = 0.05  # of the training
_MAX_GRADIENT_NORM = 1.0  # norm of all gradients
# Chance of the whole model in a step; the levels below share the rest. With a third it strays from where it started.
_WHOLE_MODEL_CHANCE = 1 / 2
# Added to the difference, whose root has no slope at 0, where the whole model begins.
_ROOT_OFFSET = 1e-6
_SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Effort:
    """How long to train: a number of steps, or seconds of training."""

    seed: int
    steps: int | None = None
    seconds: float | None = None

    def done(self, steps: int, seconds: float) -> float:
        """Share of the training that is behind, from 0; at 1 or more it ends."""
        if self.steps is not None:
            return steps / self.steps
        assert self.seconds is not None
        return seconds / self.seconds


@dataclass(frozen=True)
class Taught:
    """What a training came to: ``losses`` are those of the steps of this call, in order."""

    steps: int
    seconds: float
    losses: tuple[float, ...]


def distill(
    model: UniversalModel,
    teacher: torch.nn.Module,
    ladder: Sequence[Level],
    texts: TextBatches,
    effort: Effort,
    stage: Stage,
    clock: Clock,
) -> Taught:
    """Trains ``model`` in place: every level of ``ladder``, the last of them the whole, to answer like ``teacher``.

    A step runs one level, drawn at random. Tables of tokens and positions stay as they are: a batch reads few of their
    rows. The state is kept in the stage's work folder now and then, and found there again.
    Raises CheckpointError if the loss is no longer finite.
    """
    passes = NestedPasses(model, [level.submodel for level in ladder])
    blocks, signature = blocks_of(model), model.source.signature
    weights = trainable(model)
    optimiser = torch.optim.AdamW(weights.values(), lr=_LEARNING_RATE, betas=_BETAS, weight_decay=0.0, fused=True)
    path = stage.work / "training.safetensors"
    steps, before = load_state(path, weights, optimiser)
    began = saved = time.perf_counter()
    losses: list[float] = []
    for weight in weights.values():
        weight.requires_grad_(True)
    seconds = before
    while (done := effort.done(steps, seconds)) < 1:
        clock.tick(*(steps, effort.steps) if effort.steps else (int(seconds), int(effort.seconds or 0) + 1))
        batch = texts.at(steps, BATCH, effort.seed)
        with torch.no_grad():
            expected = run(teacher, blocks, batch.inputs)
        found = passes.of(_drawn(len(ladder), effort.seed, steps), batch.inputs)
        # The root: as squares, the small error of the whole model would not be felt beside that of the smallest level.
        loss = (difference(signature, found, expected, batch.weights) + _ROOT_OFFSET).sqrt()
        if not torch.isfinite(loss):
            raise CheckpointError(
                f"{model.source.checkpoint.folder}: training diverged at step {steps + 1}: the loss is not finite; "
                "do the texts fit this model?"
            )
        for group in optimiser.param_groups:
            group["lr"] = _LEARNING_RATE * min((done + 1e-3) / _WARM_UP_SHARE, 1 - done)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(weights.values(), _MAX_GRADIENT_NORM)
        optimiser.step()
        losses.append(loss.item())
        steps += 1
        now = time.perf_counter()
        seconds = before + now - began
        if now - saved >= _SAVE_SECONDS or effort.done(steps, seconds) >= 1:
            save_state(path, weights, optimiser, steps, seconds)
            saved = time.perf_counter()
    model.module.requires_grad_(False)
    return Taught(steps, seconds, tuple(losses))


def trainable(model: UniversalModel) -> dict[str, torch.nn.Parameter]:
    """The parameters that training may change, by the names that the spec uses: all but embedding tables, and the
    modules behind the model, which no submodel narrows and whose files stay as they are."""
    tables = {
        id(weight)
        for part in model.module.modules()
        if isinstance(part, torch.nn.Embedding)
        for weight in part.parameters(recurse=False)
    }
    return {
        name: weight
        for name, weight in model.parameters().items()
        if id(weight) not in tables and not name.startswith(HEAD)
    }


def _drawn(levels: int, seed: int, step: int) -> int:
    """Number of the level of one step."""
    generator = np.random.default_rng([seed, step])
    return levels - 1 if generator.random() < _WHOLE_MODEL_CHANCE else int(generator.integers(levels - 1))
