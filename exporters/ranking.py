"""Orders every elastic axis by importance, once, so that a submodel is always a prefix.

FFN neurons and attention heads may be permuted without changing the function: the rows that produce a step and the
columns that consume it move together. What moves together is what the spec slices by one axis, so nothing here knows
any architecture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch

from ..elastic import PrefixSlice
from ..errors import CheckpointError, ExportError
from ..runtime.manifest import Ranking
from .universal import PREFIX, UniversalModel

Scores = Mapping[str, torch.Tensor]

# Random output directions per batch: the mean of (v . J h)^2 over v estimates |J h|^2.
_PROBES = 2


def magnitude_scores(model: UniversalModel) -> Scores:
    """Squared weight norm of every step of every axis, ``[n]`` per axis: needs no data."""
    parameters = model.parameters()
    scores = {axis.name: torch.zeros(axis.size, dtype=torch.float64) for axis in model.spec.prefix_axes}
    for cut in model.spec.slices:
        blocks = step_blocks(parameters[cut.parameter].data, cut).double()
        scores[cut.axis] += blocks.flatten(1).square().sum(1)
    return scores


def taylor_scores(
    model: UniversalModel,
    batches: Sequence[tuple[torch.Tensor, ...]],
    on_batch: Callable[[int, int], None] | None = None,
) -> Scores:
    """First-order Taylor importance ``[n]`` per axis, without labels.

    Zeroing step ``j`` of an axis changes the outputs by about ``J_j h_j``: its activation times the derivative of the
    outputs. The score is the expected square of that change over texts, estimated with random output directions. The
    activation is the input of the layer whose columns the axis slices. Where a model has exits, each judges the layers
    before it.
    """
    exits = model.source.exits
    module = exits.every_exit(model.module) if exits else model.module
    consumers = _consumers(model)
    captured: dict[str, torch.Tensor] = {}
    scores = {axis.name: torch.zeros(axis.size, dtype=torch.float64) for axis in model.spec.prefix_axes}

    def capture(axis: str) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            captured[axis] = inputs[0].requires_grad_() if inputs[0].is_leaf else inputs[0]

        return hook

    hooks = [layer.register_forward_pre_hook(capture(cut.axis)) for cut, layer in consumers]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad():
            for index, batch in enumerate(batches):
                outputs = module(*batch)
                axes = [cut.axis for cut, _ in consumers]
                hidden = [captured[axis] for axis in axes]
                for probe in range(_PROBES):
                    objective = _projection(outputs, generator)
                    keep = probe < _PROBES - 1
                    gradients = torch.autograd.grad(objective, hidden, retain_graph=keep)
                    for (cut, _), h, gradient in zip(consumers, hidden, gradients, strict=True):
                        # [B, S, n * unit] -> change of the objective per text and step [B, n]
                        change = (h * gradient).detach().flatten(1, -2).sum(1)
                        change = change.reshape(len(change), -1, cut.unit).sum(-1)
                        scores[cut.axis] += change.double().square().sum(0)
                if on_batch:
                    on_batch(index + 1, len(batches))
    finally:
        for hook in hooks:
            hook.remove()
    return scores


def rank(
    model: UniversalModel, scores: Scores, method: Literal["magnitude", "taylor"], texts: Iterable[str] = ()
) -> Ranking:
    """Permutes the model in place so that every axis falls in importance; the function stays the same.

    Equal scores keep their order. Returns what the manifest records. Raises CheckpointError if a score is not finite.
    """
    order_hash = hashlib.sha256()
    for axis in model.spec.prefix_axes:
        if not torch.isfinite(scores[axis.name]).all():
            raise CheckpointError(
                f"axis {axis.name}: importance is not finite; the weights or calibration text overflow"
            )
        order = torch.argsort(scores[axis.name], descending=True, stable=True)
        order_hash.update(order.numpy().astype("<i8").tobytes())
        permute_axis(model, axis.name, order)
    lines = list(texts)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else None
    return Ranking(method, digest, len(lines) or None, order_hash.hexdigest())


def permute_axis(model: UniversalModel, axis: str, order: torch.Tensor) -> None:
    """Puts step ``order[i]`` of ``axis`` at place ``i``, in every parameter that the axis slices."""
    parameters = model.parameters()
    for cut in model.spec.slices:
        if cut.axis == axis:
            data = parameters[cut.parameter].data
            data.copy_(step_blocks(data, cut)[order].flatten(0, 1).movedim(0, cut.dim))


def step_blocks(data: torch.Tensor, cut: PrefixSlice) -> torch.Tensor:
    """The steps of an axis in front: ``[n, unit, ...]``."""
    steps = data.movedim(cut.dim, 0)
    return steps.reshape(-1, cut.unit, *steps.shape[1:])


def _consumers(model: UniversalModel) -> list[tuple[PrefixSlice, torch.nn.Module]]:
    """Per axis, the layer that reads it: the one whose weight is sliced along its input dimension."""
    found = {cut.axis: cut for cut in model.spec.slices if cut.dim == 1}
    missing = [axis.name for axis in model.spec.prefix_axes if axis.name not in found]
    if missing:
        raise ExportError(
            f"axis {missing[0]}: no weight is sliced along dimension 1, so Taylor ranking has no activation"
        )
    return [(cut, model.module.get_submodule(PREFIX + cut.parameter.rpartition(".")[0])) for cut in found.values()]


def _projection(outputs: tuple[torch.Tensor, ...], generator: torch.Generator) -> torch.Tensor:
    """A random direction through all floating outputs, each scaled to unit mean square."""
    total = torch.zeros(())
    for output in outputs:
        if output.requires_grad:
            direction = torch.randn(output.shape, generator=generator)
            total = total + (output * direction).sum() / output.detach().square().mean().sqrt().clamp(min=1e-12)
    return total
