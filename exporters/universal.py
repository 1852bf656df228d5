"""The universal model in torch: loaded, and narrowed to any submodel without copying weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ..elastic import ElasticSpec, Submodel
from ..errors import CheckpointError
from .source import ModelSource

# Families wrap the user's module as attribute ``model``; names in an ElasticSpec are the module's own.
PREFIX = "model."


@dataclass(frozen=True)
class UniversalModel:
    """The user's module (eval, float32) with the source that describes it."""

    source: ModelSource
    module: torch.nn.Module

    @property
    def spec(self) -> ElasticSpec:
        return self.source.spec

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by the names that the spec uses; a tied parameter appears once."""
        return {name.removeprefix(PREFIX): value for name, value in self.module.named_parameters()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The constants that a task may have others of, by name."""
        own = self.source.tasks.tensors if self.source.tasks is not None else frozenset()
        named = ((name.removeprefix(PREFIX), value) for name, value in self.module.named_buffers())
        return {name: value for name, value in named if name in own}

    def stored_names(self) -> set[str]:
        """Names of what the weight store may have: parameters, tensors made of them, constants that are a task's."""
        return self.parameters().keys() | self.spec.folded.keys() | self.buffers().keys()

    def stored(self) -> Callable[[str], torch.Tensor]:
        """Source of a parameter, or a tensor made of them, by its name."""
        parameters, folded = {**self.parameters(), **self.buffers()}, self.source.architecture.folded

        def tensor(name: str) -> torch.Tensor:
            if folded is not None and name in folded.shapes:
                return folded.make(self.module, name).detach()
            return parameters[name].detach()

        return tensor

    def with_parameters(self, values: Mapping[str, torch.Tensor]) -> UniversalModel:
        """A copy whose parameters, and constants that are a task's, are ``values``, and where those lack one, this
        model's own."""
        memo: dict[int, object] = {id(buffer): buffer for buffer in self.module.buffers()}
        memo |= {id(buffer): values.get(name, buffer) for name, buffer in self.buffers().items()}
        for name, parameter in self.parameters().items():
            memo[id(parameter)] = torch.nn.Parameter(values.get(name, parameter.data), requires_grad=False)
        return replace(self, module=copy.deepcopy(self.module, memo))

    def narrow(self, submodel: Submodel) -> torch.nn.Module:
        """The module narrowed to ``submodel``: a copy whose parameters are views of the first ``n`` steps.

        It holds the same buffers, which may be as large as the weights.
        """
        memo: dict[int, object] = {id(buffer): buffer for buffer in self.module.buffers()}
        for name, parameter in self.parameters().items():
            view = parameter.data
            for cut in self.spec.slices_of(name):
                view = view.narrow(cut.dim, 0, submodel[cut.axis] * cut.unit)
            memo[id(parameter)] = torch.nn.Parameter(view, requires_grad=False)
        narrowed = copy.deepcopy(self.module, memo)
        for part in narrowed.modules():
            if isinstance(part, torch.nn.Linear):
                part.out_features, part.in_features = part.weight.shape
        if self.source.architecture.narrow is not None:
            self.source.architecture.narrow(narrowed, submodel)
        return narrowed


def load_universal(source: ModelSource) -> UniversalModel:
    """Loads the user's module with its weights.

    Raises CheckpointError if weights are missing, misfit or not finite.
    """
    model = UniversalModel(source, source.architecture.load().eval())
    parameters = model.parameters()
    for cut in (*source.spec.slices, *source.spec.order_followers):
        if cut.parameter not in parameters:
            raise CheckpointError(
                f"{source.checkpoint.folder}: tensor {cut.parameter} is not a parameter of "
                f"{type(model.module.model).__name__}; check architectures in config.json"
            )
    _refuse_other_parameters(model)
    return model


def _refuse_other_parameters(model: UniversalModel) -> None:
    """Plans are made of what configuration and headers say; a module that has more, or less, is another model."""
    source, parameters = model.source, model.parameters()
    name_of = type(model.module.model).__name__
    for name, parameter in parameters.items():
        if source.shapes.get(name) != tuple(parameter.shape):
            raise CheckpointError(
                f"{source.checkpoint.folder}: {name_of} has a parameter {name} {list(parameter.shape)}, which "
                "config.json does not tell; a copy of a tied weight that differs from it is such a parameter"
            )
    for name in source.shapes.keys() - parameters.keys():
        raise CheckpointError(
            f"{source.checkpoint.folder}: {name_of} has no parameter {name}, which config.json tells of"
        )
