"""A model opened for many tasks: what its folders of tasks say, read before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...bundle.entries.task_entry import TasksEntry
from ...errors import CheckpointError
from ..source import ModelSource
from ..tasks.adapter_folder import is_adapter, read_adapter
from ..tasks.task_form import Task
from .low_rank import ranks_of, stated_ranks, task_of, with_low_rank


def with_tasks(
    source: ModelSource, folders: Mapping[str, Path], lora_rank: int | None = None
) -> tuple[ModelSource, dict[str, Task]]:
    """``source`` whose engines take tasks, and the tasks in ``folders``, by name: all of the model's own form, or all
    adapters of PEFT, for which engines have a pair of rank ``lora_rank`` at least beside each target.

    Raises CheckpointError for a model that takes none, and for a folder that is none of its tasks.
    """
    adapters = [name for name, folder in folders.items() if is_adapter(folder)]
    if not adapters:
        if lora_rank is not None:
            raise CheckpointError("`lora_rank`: none of the tasks is an adapter of PEFT; leave it out")
        source = _in_own_form(source)
        assert source.tasks is not None
        return source, {name: source.tasks.read(folder) for name, folder in folders.items()}
    if others := folders.keys() - set(adapters):
        other = sorted(others)[0]
        raise CheckpointError(
            f"{folders[other]}: no adapter of PEFT, as {folders[adapters[0]]} is; tasks of one bundle are of one kind"
        )
    read = {name: read_adapter(folder, source.architecture.parameter_shapes) for name, folder in folders.items()}
    ranks = ranks_of(read.values(), lora_rank)
    source = with_low_rank(source, ranks, {parameter for adapter in read.values() for parameter in adapter.saved})
    return source, {name: task_of(adapter, ranks) for name, adapter in read.items()}


def with_stated_tasks(source: ModelSource, entry: TasksEntry) -> ModelSource:
    """``source`` whose engines take tasks as a bundle states it. Raises CheckpointError where it takes others."""
    if entry.kind == "lora":
        ranks, saved = stated_ranks(entry)
        shapes = source.architecture.parameter_shapes
        for name in (*(f"{module}.weight" for module in ranks), *saved):
            if name not in shapes:
                raise CheckpointError(
                    f"{source.checkpoint.folder}: has no {name:.120}, beside which the bundle's tasks have tensors; it "
                    "was made from another model"
                )
        return with_low_rank(source, ranks, saved)
    return _in_own_form(source)


def _in_own_form(source: ModelSource) -> ModelSource:
    form = source.architecture.tasks
    if form is None:
        raise CheckpointError(
            f"{source.checkpoint.folder}: family {source.family.name} has tasks as adapters of PEFT alone; expected "
            "folders with adapter_config.json"
        )
    return replace(source, tasks=form)
