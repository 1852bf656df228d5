"""Running a module while listening to its blocks, on its own weights or on others in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...elastic import Submodel
from ...exporters.universal import PREFIX, UniversalModel


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
