"""Depth as an axis of a model that was trained to answer after several of its layers, each time by the norm, pooling
and head that stand behind the last: AdaptiveLayer and two-dimensional Matryoshka embeddings (Li et al. 2024,
arXiv:2402.14776), Starbucks (Zhuang et al. 2024, arXiv:2410.13230). The layers behind are left out, and nothing is
added (no torch here)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ..bucket import Bucket
from ..elastic import DEPTH, Axis, Submodel
from ..errors import PlanError
from ..workload import Op
from .architecture import Architecture
from .checkpoints.checkpoint import Checkpoint

if TYPE_CHECKING:  # plans are made without torch
    import torch

# A list of modules, and the number of one in it.
_LISTED = re.compile(r"(?P<list>(?:[^.\d][^.]*\.)+?)(?P<number>\d{1,9})\.")


def with_depth(architecture: Architecture, checkpoint: Checkpoint, layers: Sequence[int]) -> Architecture:
    """``architecture`` with an axis ``depth`` of these ``layers`` and its last; one that has exits of its own as it is.

    Raises PlanError for layers that it does not have, and for a model whose layers are not one list, run in order.
    """
    spec, last = architecture.spec, architecture.spec.depth
    if DEPTH in spec.kinds:
        return architecture
    stack = _stack(architecture)
    if stack is None:
        raise PlanError(
            f"{checkpoint.folder}: exits {list(layers)} requested, but it is not known what of this model they leave "
            f"out; expected one list of {last} layers, without routes, variants or tasks"
        )
    if wrong := [layer for layer in layers if not 1 <= layer <= last]:
        raise PlanError(f"{checkpoint.folder}: exits: expected layers from 1 to {last}, got {wrong[0]}")
    numbers = {name: _LISTED.match(name) for name in architecture.parameter_shapes}
    deepest = {name: int(found["number"]) + 1 for name, found in numbers.items() if found and found["list"] == stack}

    def narrow(module: torch.nn.Module, submodel: Submodel) -> None:
        if architecture.narrow is not None:
            architecture.narrow(module, submodel)
        assert submodel.depth is not None
        del cast(Any, module.get_submodule(f"model.{stack.rstrip('.')}"))[submodel.depth :]

    def workload(submodel: Submodel, bucket: Bucket) -> list[Op]:
        assert submodel.depth is not None
        return list(_before(architecture.workload(submodel, bucket), stack, submodel.depth))

    return replace(
        architecture,
        spec=replace(spec, axes=(Axis(DEPTH, last, tuple(sorted({*layers, last}))), *spec.axes), min_depth=deepest),
        narrow=narrow,
        workload=workload,
    )


def _stack(architecture: Architecture) -> str | None:
    """The name before the numbers of the layers, with the dot; None where there is not exactly one list of as many."""
    if architecture.variants or architecture.routing or architecture.tasks:
        return None
    found = defaultdict[str, set[int]](set)
    for name in architecture.parameter_shapes:
        if match := _LISTED.match(name):
            found[match["list"]].add(int(match["number"]))
    lists = [name for name, numbers in found.items() if numbers == {*range(architecture.spec.depth)}]
    return lists[0] if len(lists) == 1 else None


def _before(ops: Sequence[Op], stack: str, depth: int) -> Iterator[Op]:
    """Those of ``ops`` that do not belong to layers behind ``depth``. What reads no weights is numbered, and belongs to
    the layer before it."""
    place, is_behind = re.compile(rf"(?:{re.escape(stack)}|layers\.)(\d+)\."), False
    for op in ops:
        if match := place.match(op.name):
            is_behind = int(match[1]) >= depth
        elif not op.name[0].isdigit():
            is_behind = False
        if not is_behind:
            yield op
