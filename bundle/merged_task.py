"""A task whose tensors are in the weights of a bundle's engines, as runners open them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .entries.task_entry import TaskKind


@dataclass(frozen=True, eq=False)
class MergedTask:
    """Task ``name``: its float32 ``arrays`` by the names of ``TasksEntry.tensors``. Of ``lora`` pairs are summed into
    the weights beside them; all else takes the place of the base's own. None is the base, which changes nothing."""

    name: str | None
    kind: TaskKind
    arrays: Mapping[str, np.ndarray]


BASE = MergedTask(None, "lora", {})
