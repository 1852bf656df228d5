"""What a model does while it trains and at no other time: gradient equilibrium between its exits, and dropout.

Both are hooks around the exporter's model and are gone when the block ends, so nothing has to be stripped on export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional

from ....exporters.families.cost_eff.model import CostEffModel


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
