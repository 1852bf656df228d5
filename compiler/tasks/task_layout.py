"""A task's tensors as the engines of a bundle take them: in the bundle's order, laid out as the weight store is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.numpy import save as save_bytes

from ...bundle.entries.task_entry import TasksEntry, TaskTensor
from ...errors import CheckpointError
from ...exporters.architecture import Task, hash_of
from ...exporters.ranking import permuted_steps
from ...exporters.universal import UniversalModel
from ..graph.store import Store, laid_out, stored_name

# By order of the spec: the step of the checkpoint that lies at each place.
Orders = Mapping[str, np.ndarray]


def frozen_sha256(universal: UniversalModel) -> str:
    """The hash of what tasks have in common; of a model in the order of its checkpoint."""
    own = universal.source.tasks.tensors if universal.source.tasks is not None else frozenset()
    return hash_of({name: value.detach().numpy() for name, value in universal.parameters().items() if name not in own})


def tasks_entry(universal: UniversalModel, store: Store, base_sha256: str) -> TasksEntry | None:
    """What the manifest states of tasks: the tensors of theirs that engines read. None for a model without tasks."""
    form, spec = universal.source.tasks, universal.spec
    if form is None:
        return None
    tensors = []
    for parameter in sorted(form.tensors):
        name = stored_name(parameter, spec)
        if name in store:  # of those that no engine reads, such as the routers of dense engines alone, there is none
            cut = store[name].cut
            axis, unit = (None, 1) if cut is None else (cut.axis, cut.unit)
            tensors.append(TaskTensor(name, store[name].shape, axis, unit))
    return TasksEntry(form.kind, base_sha256, tuple(tensors))


def read_orders(path: Path | None) -> Orders:
    """The orders that a bundle's ``ranking.safetensors`` holds; none without one."""
    return {} if path is None else load_file(path)


def require_base(task: Task, base_sha256: str) -> None:
    """Raises CheckpointError for a task whose folder states other frozen weights than ``base_sha256``."""
    if task.base_sha256 is not None and task.base_sha256 != base_sha256:
        raise CheckpointError(
            f"{task.folder}: made for a base whose frozen weights have the hash {task.base_sha256[:16]}..., this one's "
            f"have {base_sha256[:16]}...; take the base that it was trained on"
        )


def with_task(universal: UniversalModel, task: Task, orders: Orders, base_sha256: str) -> UniversalModel:
    """``universal``, in the bundle's order, with the tensors of ``task`` in that order as well.

    Raises CheckpointError for a task of another base.
    """
    require_base(task, base_sha256)
    values = {name: torch.from_numpy(array) for name, array in task.tensors.items()}
    for order in universal.spec.orders:
        if order.name in orders:
            places = torch.from_numpy(orders[order.name]).long()
            for cut in (*order.slices, *order.followers):
                if cut.parameter in values:
                    values[cut.parameter] = permuted_steps(values[cut.parameter], cut, places)
    return universal.with_parameters(values)


def task_bytes(of_task: UniversalModel, entry: TasksEntry) -> bytes:
    """The file of a task: a safetensors file of the tensors that ``entry`` lists."""
    stored = of_task.stored()
    return bytes(save_bytes({tensor.name: laid_out(stored, tensor.name) for tensor in entry.tensors}))
