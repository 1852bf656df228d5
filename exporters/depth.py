"""Depth as an axis of a model that was trained to answer after several of its layers, each time by the norm, pooling
and head that stand behind the last: AdaptiveLayer and two-dimensional Matryoshka embeddings (Li et al. 2024,
arXiv:2402.14776), Starbucks (Zhuang et al. 2024, arXiv:2410.13230), LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710)
language models, whose exits draft for all layers on one cache. The layers behind are left out, and nothing is
added. Slices of Gemma 3n leave out layers between others (no torch here)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..bucket import Bucket
from ..elastic import DEPTH, Axis, Submodel
from ..errors import PlanError
from ..workload import Op
from .architecture import Architecture
from .checkpoints.checkpoint import Checkpoint

if TYPE_CHECKING:  # plans are made without torch
    import torch

# A list of modules, and the number of one in it, as a parameter of it begins.
LISTED = re.compile(r"(?P<list>(?:[^.\d][^.]*\.)+?)(?P<number>\d{1,9})\.")


def with_depth(architecture: Architecture, checkpoint: Checkpoint, layers: Sequence[int]) -> Architecture:
    """``architecture`` with an axis ``depth`` of these ``layers`` and its last; one that has exits of its own as it is.

    Raises PlanError for layers that it does not have, and for a model whose layers are not one list, run in order.
    """
    spec, last = architecture.spec, architecture.spec.depth
    if DEPTH in spec.kinds:
        return architecture
    stack = layer_list(architecture)
    if stack is None:
        raise PlanError(
            f"{checkpoint.folder}: exits {list(layers)} requested, but it is not known what of this model they leave "
            f"out; expected one list of {last} layers, without routes, variants or tasks"
        )
    require_layers(checkpoint, layers, last)
    cached = architecture.cached
    if cached is not None and cached.takes_depth and len(cached.layers) == last and cached.window is None:
        cached = replace(cached, depths=tuple(range(1, last + 1)))
    elif cached is not None:
        reason = (
            "some layers have a window, or no keys of their own"
            if cached.takes_depth
            else "caches of this class are known for all of its layers alone"
        )
        cached = replace(cached, family_problem=f"with exits: {reason}; leave the exits out")

    def behind(module: Any, depth: int) -> None:
        del module[depth:]

    kept = {layer: frozenset(range(layer)) for layer in (*layers, last)}
    return _with_layers(replace(architecture, cached=cached), stack, kept, behind)


def require_layers(checkpoint: Checkpoint, exits: Sequence[int], last: int) -> None:
    """Raises PlanError for ``exits`` after layers of which there are ``last``."""
    if wrong := [layer for layer in exits if not 1 <= layer <= last]:
        raise PlanError(f"{checkpoint.folder}: exits: expected layers from 1 to {last}, got {wrong[0]}")


def with_left_out(architecture: Architecture, checkpoint: Checkpoint, sets: Sequence[Sequence[int]]) -> Architecture:
    """``architecture`` with an axis ``depth``: of the layers in each of ``sets`` submodels may have none.

    Raises PlanError for layers that cannot be left out, and for sets that cannot be told apart by how many layers are
    left.
    """
    last, stack = architecture.spec.depth, layer_list(architecture)
    allowed = architecture.skippable
    for layer in sorted({layer for left_out in sets for layer in left_out}):
        if stack is None or layer not in allowed:
            some = f"some of {min(allowed)} to {max(allowed)}" if stack is not None and allowed else "none"
            raise PlanError(
                f"{checkpoint.folder}: layer {layer} cannot be left out, expected {some}; the table is of another model"
            )
    assert stack is not None
    kept = {last: frozenset(range(last))}
    for left_out in sets:
        layers = frozenset(range(last)).difference(left_out)
        if kept.setdefault(len(layers), layers) != layers:
            raise PlanError(f"{checkpoint.folder}: two sets of {len(left_out)} layers to leave out; take one of them")
    depths = sorted(kept)
    if any(not kept[low] < kept[high] for low, high in pairwise(depths)):
        raise PlanError(f"{checkpoint.folder}: layers left out must be left out of smaller submodels too; take one set")

    def between(module: Any, depth: int) -> None:
        from .modules.layers import Passed

        for layer in kept[last] - kept[depth]:
            module[layer] = Passed()

    return _with_layers(architecture, stack, kept, between)


def _with_layers(
    architecture: Architecture, stack: str, kept: Mapping[int, frozenset[int]], leave_out: Callable[[Any, int], None]
) -> Architecture:
    """``architecture`` with an axis ``depth`` of the numbers in ``kept``, which has the layers of each;
    ``leave_out(modules, depth)`` takes the others out of the list called ``stack``."""
    spec, depths = architecture.spec, tuple(sorted(kept))
    least = {layer: min(depth for depth in depths if layer in kept[depth]) for layer in kept[depths[-1]]}
    placed = {name: match for name in architecture.parameter_shapes if (match := LISTED.match(name))}

    def narrow(module: torch.nn.Module, submodel: Submodel) -> None:
        if architecture.narrow is not None:
            architecture.narrow(module, submodel)
        assert submodel.depth is not None
        leave_out(module.get_submodule(f"model.{stack}"), submodel.depth)

    def workload(submodel: Submodel, bucket: Bucket) -> list[Op]:
        assert submodel.depth is not None
        return list(_of_layers(architecture.workload(submodel, bucket), stack, kept[submodel.depth]))

    def with_layer(axis: Axis) -> Axis:
        layer = axis.layer
        is_first = layer is None or least[layer] == layer + 1
        return axis if layer is None or is_first else replace(axis, min_depth=least[layer])

    return replace(
        architecture,
        spec=replace(
            spec,
            axes=(Axis(DEPTH, depths[-1], depths), *map(with_layer, spec.axes)),
            min_depth={n: least[int(match["number"])] for n, match in placed.items() if match["list"] == f"{stack}."},
        ),
        narrow=narrow,
        workload=workload,
    )


def layer_list(architecture: Architecture) -> str | None:
    """The name of the list of the layers; None where there is not exactly one list of as many, or
    layers of the same number are in several, as in an encoder with its decoder."""
    if architecture.variants or architecture.routing or architecture.tasks:
        return None
    layered = [(axis.kind, axis.layer) for axis in architecture.spec.axes if axis.layer is not None]
    if len(set(layered)) < len(layered):
        return None
    found = defaultdict[str, set[int]](set)
    for name in architecture.parameter_shapes:
        if match := LISTED.match(name):
            found[match["list"]].add(int(match["number"]))
    lists = [name for name, numbers in found.items() if numbers == {*range(architecture.spec.depth)}]
    return lists[0].rstrip(".") if len(lists) == 1 else None


def _of_layers(ops: Sequence[Op], stack: str, layers: frozenset[int]) -> Iterator[Op]:
    """Those of ``ops`` that belong to ``layers`` or to none. An operation that reads no weights is numbered, and
    belongs to the layer before it."""
    place, runs = re.compile(rf"(?:{re.escape(stack)}|layers)\.(\d+)\."), True
    for op in ops:
        if match := place.match(op.name):
            runs = int(match[1]) in layers
        elif not op.name[0].isdigit():
            runs = True
        if runs:
            yield op


# The part of all layers that lies at each end; llama.cpp's mixtures of 4 bits take as much.
_PART = 8


def outermost_products(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """The weights that rounding costs most for their bytes, the last products of the FFNs in the outermost layers: of
    the first and the last eighth of each list of layers, rounded down, the weight with more inputs than any other of
    its layer; none of a layer where several have as many. ``shapes`` are ``[..., out, in]``, by parameter. They are
    known by shapes and places alone, the same in every submodel, so that plans know them before anything is traced and
    a weight is stored once (docs/decisions/0054)."""
    lists = defaultdict[str, dict[int, dict[str, int]]](dict)
    for name, shape in shapes.items():
        if len(shape) in (2, 3) and (match := LISTED.match(name)):
            lists[match["list"]].setdefault(int(match["number"]), {})[name] = shape[-1]
    found = set[str]()
    for layers in lists.values():
        numbers = sorted(layers)
        for number in numbers[: len(numbers) // _PART] + numbers[len(numbers) - len(numbers) // _PART :]:
            inputs = layers[number]
            widest = [name for name in inputs if inputs[name] == max(inputs.values())]
            found |= {*widest} if len(widest) == 1 else set()
    return frozenset(found)
