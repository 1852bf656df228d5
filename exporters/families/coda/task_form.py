"""How models with a conditional encoder take tasks: which tensors are a task's own (no torch here)."""

from __future__ import annotations

from pathlib import Path

from ...tasks.task_form import Task, TaskForm
from .architecture.config import CodaConfig
from .architecture.shapes import is_of_task, parameter_shapes, temperature_names


def coda_task_form(config: CodaConfig, prefix: str = "") -> TaskForm | None:
    """Of a model whose encoder ``config`` describes, with the encoder's names behind ``prefix``. None where no layer is
    conditional."""
    if not config.conditional:
        return None

    def read(folder: Path) -> Task:
        from .task_folder import read_task

        return read_task(config, folder, prefix)

    own = [name for name in parameter_shapes(config) if is_of_task(name)]
    return TaskForm("coda", frozenset(f"{prefix}{name}" for name in (*own, *temperature_names(config))), read)
