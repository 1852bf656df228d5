"""The tensors of a bundle that are a task's own: engines take them as inputs, and tasks differ in nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ...elastic import Submodel
from .engine_entry import EngineEntry

# Adapters, routers, norms and schedules of conditional adapters, or pairs of low-rank matrices beside linear layers.
TaskKind = Literal["coda", "lora"]
# Names of the two matrices of an adapter, behind the name of their layer.
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class TaskTensor:
    """One float32 tensor by the name that engines give the input, and its ``shape`` in the universal model.

    Dimension 0 has ``unit`` elements for each step of ``axis``, where the tensor shrinks with one.
    """

    name: str
    shape: tuple[int, ...]
    axis: str | None = None
    unit: int = field(default=1, metadata={"min": 1})

    def shape_in(self, submodel: Submodel) -> tuple[int, ...]:
        """The shape that engines of ``submodel`` take: a prefix."""
        return self.shape if self.axis is None else (submodel[self.axis] * self.unit, *self.shape[1:])


@dataclass(frozen=True)
class TasksEntry:
    """Everything that the tasks of a bundle share. The base's own ``tensors`` lie in the weight store, by these names.

    ``base_sha256`` is the hash of the frozen weights, everything that is no task's: tasks of another base are refused.
    ``merged`` are engines that take no such inputs, one beside each that does: the tensors of a task, merged into the
    weights that they read, give its own engine. Empty where tasks are inputs alone.
    """

    kind: TaskKind
    base_sha256: str
    tensors: tuple[TaskTensor, ...]
    merged: tuple[EngineEntry, ...] = ()


@dataclass(frozen=True, eq=False)
class MergedTask:
    """Task ``name``: its float32 ``arrays`` by the names of ``TasksEntry.tensors``. Pairs of ``lora`` are summed into
    the weights beside them; all else takes the place of the base's own. None is the base, which changes nothing."""

    name: str | None
    kind: TaskKind
    arrays: Mapping[str, np.ndarray]


BASE = MergedTask(None, "lora", {})
