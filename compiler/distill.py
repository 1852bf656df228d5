"""Nested self-distillation: the frozen original teaches the universal model and its levels, which share its weights."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from ..elastic import Submodel
from ..errors import CheckpointError
from ..exporters.sentence_transformers.read_modules import HEAD
from ..exporters.signature import Signature
from ..exporters.universal import PREFIX, UniversalModel
from ..whole_file import write_whole
from .examples.texts import TextBatches
from .planning.levels import Level
from .work.clock import Clock
from .work.staging import Stage

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
# Relative squares of vectors that are almost zero would be noise.
_MIN_SQUARED_NORM = 1e-6
# AdamW's own names for what it remembers of each weight.
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


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
    """Result of a training: ``losses`` are those of the steps of this call, in order."""

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


def difference(signature: Signature, student: Pass, teacher: Pass, weights: torch.Tensor) -> torch.Tensor:
    """Mean relative squared error, a scalar: of the outputs, and of the hidden states after each block.

    The outputs that count are those with a sequence, token by token, and the text embedding; where a model has neither,
    all that it has. Every vector's squared error is divided by the square of the teacher's. ``weights`` float32
    ``[B, S]`` says which tokens count.
    """
    embedding = signature.text.embedding if signature.text else None
    wanted = [spec.name == embedding or "sequence" in spec.dims for spec in signature.outputs]
    total = torch.zeros(())
    for spec, counts, found, expected in zip(signature.outputs, wanted, student.outputs, teacher.outputs, strict=True):
        if counts or not any(wanted):
            total = total + _relative(found, expected, weights if "sequence" in spec.dims else None)
    # The states in between give every layer something of its own to reach, which no output alone does in few steps.
    for found, expected in zip(student.hidden, teacher.hidden, strict=True):
        total = total + _relative(found, expected, weights) / len(student.hidden)
    return total


def _relative(found: torch.Tensor, expected: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Difference of vectors ``[B, S, H]`` with weights ``[B, S]``, or ``[B, H]``, where all count."""
    errors = (found - expected).square().sum(-1) / expected.square().sum(-1).clamp(min=_MIN_SQUARED_NORM)
    return errors.mean() if weights is None else (errors * weights).sum() / weights.sum().clamp(min=1)


@dataclass(frozen=True)
class Pass:
    """One forward pass: the outputs in the signature's order, and the hidden states after each block."""

    outputs: tuple[torch.Tensor, ...]
    hidden: tuple[torch.Tensor, ...]


def run(
    module: torch.nn.Module,
    blocks: Sequence[str],
    inputs: tuple[torch.Tensor, ...],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Pass:
    """One pass of ``module``; ``blocks`` are names of the parts to listen to, ``weights`` replace its own."""
    hidden: list[torch.Tensor] = []

    def listen(_part: torch.nn.Module, _inputs: Any, output: Any) -> None:
        hidden.append(output[0] if isinstance(output, tuple) else output)

    hooks = [module.get_submodule(name).register_forward_hook(listen) for name in blocks]
    try:
        if weights is None:
            return Pass(module(*inputs), tuple(hidden))
        return Pass(torch.func.functional_call(module, dict(weights), inputs), tuple(hidden))
    finally:
        for hook in hooks:
            hook.remove()


def blocks_of(model: UniversalModel) -> list[str]:
    """The parts in which the axes lie, such as ``model.encoder.layer.3``: the innermost ones that are in a list.

    An axis outside of any list has no block.
    """
    found: dict[str, None] = {}
    for cut in model.spec.slices:
        name = PREFIX + cut.parameter
        while "." in name:
            name, _, _ = name.rpartition(".")
            if isinstance(model.module.get_submodule(name.rpartition(".")[0]), torch.nn.ModuleList):
                found[name] = None
                break
    return list(found)


class NestedPasses:
    """Passes of the universal model's submodels, whose gradients reach the universal model's parameters."""

    def __init__(self, model: UniversalModel, submodels: Sequence[Submodel]) -> None:
        self._model, self._submodels = model, submodels
        # Modules with the attributes of their submodel; what they compute with are views of the universal's weights.
        self._modules = [model.narrow(submodel) for submodel in submodels]
        self._blocks = blocks_of(model)

    def of(self, number: int, inputs: tuple[torch.Tensor, ...]) -> Pass:
        """One pass of submodel ``number``."""
        submodel = self._submodels[number]
        if submodel.is_universal:
            return run(self._model.module, self._blocks, inputs)
        views: dict[str, torch.Tensor] = {}
        for name, weight in self._model.parameters().items():
            view: torch.Tensor = weight
            for cut in self._model.spec.slices_of(name):
                view = view.narrow(cut.dim, 0, submodel[cut.axis] * cut.unit)
            views[PREFIX + name] = view
        return run(self._modules[number], self._blocks, inputs, views)


def save_state(
    path: Path, weights: Mapping[str, torch.nn.Parameter], optimiser: torch.optim.Optimizer, steps: int, seconds: float
) -> None:
    """Writes weights and moments after ``steps`` steps that took ``seconds``. Raises OutputError."""
    tensors = {}
    for name, weight in weights.items():
        tensors[f"weight:{name}"] = weight.detach()
        for moment, value in optimiser.state.get(weight, {}).items():  # none for what no loss has reached
            tensors[f"{moment}:{name}"] = value
    data = save(tensors, {"done": json.dumps([steps, seconds])})
    write_whole(path, lambda stream: stream.write(data), "the training so far")


def load_state(
    path: Path, weights: Mapping[str, torch.nn.Parameter], optimiser: torch.optim.Optimizer
) -> tuple[int, float]:
    """Puts weights and moments back in place; returns steps and seconds. (0, 0.0) where there is no such file."""
    if not path.exists():
        return 0, 0.0
    with safe_open(path, framework="pt") as file:
        known = set(file.keys())
        for name, weight in weights.items():
            weight.data.copy_(file.get_tensor(f"weight:{name}"))
            moments = {moment: f"{moment}:{name}" for moment in _MOMENTS}
            if known.issuperset(moments.values()):
                optimiser.state[weight] = {moment: file.get_tensor(key) for moment, key in moments.items()}
        steps, seconds = json.loads(file.metadata()["done"])
    return steps, seconds


def _drawn(levels: int, seed: int, step: int) -> int:
    """Number of the level of one step."""
    generator = np.random.default_rng([seed, step])
    return levels - 1 if generator.random() < _WHOLE_MODEL_CHANCE else int(generator.integers(levels - 1))
