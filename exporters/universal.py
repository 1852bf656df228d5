"""The universal model in torch: loaded, narrowed to any submodel without copying weights, its axes ordered once.

FFN neurons and attention heads may be permuted without changing the function: the rows that produce a step and the
columns that consume it move together, so ordered by importance a submodel is always a prefix. The spec slices such
parameters by one axis, so nothing here knows any architecture. Where layers are independent, each has an order of its
own.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..bundle.manifest import Ranking
from ..elastic import ElasticSpec, Order, PrefixSlice, Submodel
from ..errors import CheckpointError
from .architecture import hash_of
from .modules.layers import mend_sizes
from .source import ModelSource

# Families wrap the user's module as attribute ``model``; names in an ElasticSpec are the module's own.
PREFIX = "model."
Scores = Mapping[str, torch.Tensor]
# By order of the spec: the step of the checkpoint that lies at each place.
Places = Mapping[str, torch.Tensor]

# Python has no name for it.
_MADV_PAGEOUT = 21
# Numbers of a weight whose squares are summed at once.
_PART = 2**20
# Random output directions per batch: the mean of (v . J h)^2 over v estimates |J h|^2.
_DIRECTIONS_PER_BATCH = 2


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

    def task_constants(self) -> dict[str, torch.Tensor]:
        """The constants that a task may have others of, by name."""
        own = self.source.tasks.tensors if self.source.tasks is not None else frozenset()
        named = ((name.removeprefix(PREFIX), value) for name, value in self.module.named_buffers())
        return {name: value for name, value in named if name in own}

    def frozen_sha256(self) -> str:
        """The hash of what tasks have in common; of a model in the order of its checkpoint."""
        own = self.source.tasks.tensors if self.source.tasks is not None else frozenset()
        return hash_of({name: value.detach().numpy() for name, value in self.parameters().items() if name not in own})

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what the weight store may have, by name: parameters, tensors made of them, constants that are a
        task's. All are float32."""
        folded = self.source.architecture.folded
        own = {name: tuple(value.shape) for name, value in {**self.parameters(), **self.task_constants()}.items()}
        return own | dict(folded.shapes if folded is not None else {})

    def stored(self) -> Callable[[str], torch.Tensor]:
        """Source of a parameter, or a tensor made of them, by its name."""
        parameters, folded = {**self.parameters(), **self.task_constants()}, self.source.architecture.folded

        def tensor(name: str) -> torch.Tensor:
            if folded is not None and name in folded.shapes:
                return folded.make(self.module, name).detach()
            return parameters[name].detach()

        return tensor

    def with_parameters(self, values: Mapping[str, torch.Tensor]) -> UniversalModel:
        """A copy whose parameters, and constants that are a task's, are ``values``, and where those lack one, this
        model's own."""
        memo: dict[int, object] = {id(buffer): buffer for buffer in self.module.buffers()}
        memo |= {id(buffer): values.get(name, buffer) for name, buffer in self.task_constants().items()}
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
        mend_sizes(narrowed)
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


def magnitude_scores(model: UniversalModel) -> Scores:
    """Squared weight norm of every step, ``[n]`` per order of the spec: needs no data."""
    parameters, scores = model.parameters(), _zeros(model)
    for order in model.spec.orders:
        for cut in order.slices:
            scores[order.name] += _squares(parameters[cut.parameter].data, cut.dim).reshape(-1, cut.unit).sum(1)
    return scores


def _squares(data: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums of squares by place of dimension ``dim``, in float64, of as much at once as caches have room for."""
    if data.ndim == 1:
        return data.double().square()
    rest = [other for other in range(data.ndim) if other != dim]
    parts = torch.split(data, max(1, _PART * data.shape[rest[0]] // data.numel()), rest[0])
    return torch.stack([part.double().square_().sum(rest) for part in parts]).sum(0)


def taylor_scores(
    model: UniversalModel,
    batches: Sequence[tuple[torch.Tensor, ...]],
    on_batch: Callable[[int, int], None] | None = None,
) -> Scores:
    """First-order Taylor importance ``[n]`` per order of the spec, without labels.

    Zeroing step ``j`` of an axis changes the outputs by about ``J_j h_j``: its activation times the derivative of the
    outputs. The score is the expected square of that change over texts, estimated with random output directions. The
    activation is the input of the layer whose columns the axis slices. Where no layer has it as columns, as with
    stacked experts, the sliced weights are taken for the activation: what zeroing them changes, over a batch of texts
    together, whose directions are independent. Where a model has exits, each judges the layers before it.
    """
    exits = model.source.exits
    module = exits.every_exit(model.module) if exits else model.module
    consumers = _consumers(model)
    stacked = [order for order in model.spec.orders if order.name not in consumers]
    captured: dict[str, torch.Tensor] = {}
    scores = _zeros(model)

    def capture(name: str) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            captured[name] = inputs[0].requires_grad_() if inputs[0].is_leaf else inputs[0]

        return hook

    hooks = [layer.register_forward_pre_hook(capture(name)) for name, (_, layer) in consumers.items()]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad(), _requiring_grad(model, stacked) as weights:
            for index, batch in enumerate(batches):
                outputs = module(*batch)
                hidden = [captured[name] for name in consumers]
                for probe in range(_DIRECTIONS_PER_BATCH):
                    objective = _projection(outputs, generator)
                    keep = probe < _DIRECTIONS_PER_BATCH - 1
                    gradients = torch.autograd.grad(objective, [*hidden, *weights.values()], retain_graph=keep)
                    for (name, (cut, _)), h, gradient in zip(consumers.items(), hidden, gradients, strict=False):
                        # [B, S, n * unit] -> change of the objective per text and step [B, n]
                        change = (h * gradient).detach().reshape(len(h), -1, h.shape[-1]).sum(1)
                        change = change.reshape(len(change), -1, cut.unit).sum(-1)
                        scores[name] += change.double().square().sum(0)
                    by_weight = dict(zip(weights, gradients[len(hidden) :], strict=True))
                    for order in stacked:
                        scores[order.name] += _change_by_weights(order, weights, by_weight).square()
                if on_batch:
                    on_batch(index + 1, len(batches))
    finally:
        for hook in hooks:
            hook.remove()
    return scores


def rank(
    model: UniversalModel,
    scores: Scores,
    method: Literal["magnitude", "taylor"],
    data_sha256: str | None = None,
    samples: int | None = None,
) -> tuple[Ranking, Places]:
    """Permutes the model in place so that every order falls in importance; the function stays the same.

    Equal scores keep their order. Returns what the manifest records, of ``samples`` where scores rest on
    any, and the permutations, int64 ``[n]``. Raises CheckpointError if a score is not finite.
    """
    order_hash, permutations = hashlib.sha256(), {}
    for order in model.spec.orders:
        if not torch.isfinite(scores[order.name]).all():
            raise CheckpointError(
                f"axis {order.name}: importance is not finite; the weights or calibration text overflow"
            )
        places = torch.argsort(scores[order.name], descending=True, stable=True)
        order_hash.update(places.numpy().astype("<i8").tobytes())
        permute_axis(model, order.name, places)
        permutations[order.name] = places
    return Ranking(method, data_sha256, samples, order_hash.hexdigest()), permutations


def permute_axis(model: UniversalModel, name: str, places: torch.Tensor) -> None:
    """Puts step ``places[i]`` at place ``i``, in every parameter that has the steps of the spec's order ``name``."""
    parameters = model.parameters()
    order = next(order for order in model.spec.orders if order.name == name)
    for cut in (*order.slices, *order.followers):
        data = parameters[cut.parameter].data
        parameters[cut.parameter].data = permuted_steps(data, cut, places)  # pages of a file are dear to write into
        _page_out(data)


def _page_out(data: torch.Tensor) -> None:
    """Lets Linux take the pages of ``data``, which nobody reads any more, where they are not PyTorch's own, which are
    freed with their last reference, but of a mapped file, which stays in memory until none of it is read."""
    if sys.platform != "linux" or data.untyped_storage().resizable():
        return
    start = -(-data.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (data.data_ptr() + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT)


def permuted_steps(data: torch.Tensor, cut: PrefixSlice, places: torch.Tensor) -> torch.Tensor:
    """``data`` with step ``places[i]`` of the axis at place ``i``."""
    elements = (places[:, None] * cut.unit + torch.arange(cut.unit)).flatten()
    return data.index_select(cut.dim, elements)


def step_blocks(data: torch.Tensor, cut: PrefixSlice) -> torch.Tensor:
    """The steps of an axis in front: ``[n, unit, ...]``."""
    steps = data.movedim(cut.dim, 0)
    return steps.reshape(-1, cut.unit, *steps.shape[1:])


def _zeros(model: UniversalModel) -> dict[str, torch.Tensor]:
    return {order.name: torch.zeros(order.axis.size, dtype=torch.float64) for order in model.spec.orders}


def _consumers(model: UniversalModel) -> dict[str, tuple[PrefixSlice, torch.nn.Module]]:
    """Per order, the layer that reads it: the linear one whose weight is sliced along its input dimension, if there is
    one; a table of biases has a column for each head too, and reads none."""
    found: dict[str, tuple[PrefixSlice, torch.nn.Module]] = {}
    for order in model.spec.orders:
        for cut in order.slices:
            part = model.module.get_submodule(PREFIX + cut.parameter.rpartition(".")[0])
            if cut.dim == 1 and isinstance(part, torch.nn.Linear):
                found[order.name] = cut, part
    return found


@contextmanager
def _requiring_grad(model: UniversalModel, orders: Sequence[Order]) -> Iterator[dict[str, torch.nn.Parameter]]:
    """The parameters that ``orders`` slice, by name; they have gradients within the block."""
    parameters = model.parameters()
    weights = {cut.parameter: parameters[cut.parameter] for order in orders for cut in order.slices}
    before = {name: weight.requires_grad for name, weight in weights.items()}
    try:
        for weight in weights.values():
            weight.requires_grad_()
        yield weights
    finally:
        for name, weight in weights.items():
            weight.requires_grad_(before[name])


def _change_by_weights(
    order: Order, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """By how much zeroing the weights of each step changes the objective, to first order: ``[n]``."""
    changes = (step_blocks(weights[cut.parameter] * gradients[cut.parameter], cut) for cut in order.slices)
    return torch.stack([change.detach().flatten(1).sum(1).double() for change in changes]).sum(0)


def _projection(outputs: tuple[torch.Tensor, ...], generator: torch.Generator) -> torch.Tensor:
    """A random direction through all floating outputs, each scaled to unit mean square."""
    total = torch.zeros(())
    for output in outputs:
        if output.requires_grad:
            direction = torch.randn(output.shape, generator=generator)
            total = total + (output * direction).sum() / output.detach().square().mean().sqrt().clamp(min=1e-12)
    return total
