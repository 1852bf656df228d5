"""A model opened for many tasks: what its folders of tasks say, read before any work (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...errors import CheckpointError
from ...runtime.bundle.entries.task_entry import TasksEntry
from ..source import ModelSource
from ..tasks.task_form import Task, TaskForm


def with_tasks(source: ModelSource, folders: Mapping[str, Path]) -> tuple[ModelSource, dict[str, Task]]:
    """``source`` whose engines take tasks, and the tasks in ``folders``, by name.

    Raises CheckpointError for a model that takes none, and for a folder that is none of its tasks.
    """
    form = _own_form(source)
    return replace(source, tasks=form), {name: form.read(folder) for name, folder in folders.items()}


def with_stated_tasks(source: ModelSource, entry: TasksEntry) -> ModelSource:
    """``source`` whose engines take tasks as a bundle states it. Raises CheckpointError where it takes others."""
    form = _own_form(source)
    if form.kind != entry.kind:
        raise CheckpointError(
            f"{source.checkpoint.folder}: takes tasks of kind {form.kind}, the bundle's are {entry.kind}; it was made "
            "from another model"
        )
    return replace(source, tasks=form)


def _own_form(source: ModelSource) -> TaskForm:
    form = source.architecture.tasks
    if form is None:
        raise CheckpointError(
            f"{source.checkpoint.folder}: family {source.family.name} takes no tasks on frozen weights; expected an "
            "encoder with conditional adapters"
        )
    return form
