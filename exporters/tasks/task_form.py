"""Many tasks on one frozen model: which tensors are a task's own, and one task as a folder holds it (no torch here)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.task_entry import TaskKind
from ...elastic import Submodel
from ...workload import Op

if TYPE_CHECKING:  # plans are made without torch
    import torch


@dataclass(frozen=True, eq=False)
class Task:
    """What a folder holds of one task: float32 ``tensors`` by the names of ``TaskForm.tensors``, with the steps of each
    axis where the checkpoint has them.

    ``choices`` are the values that the task was made for, of axes with choices. ``base_sha256`` is the hash that the
    folder states of the frozen weights, None where its format has none. ``facts`` are what else it states.
    """

    folder: Path
    tensors: Mapping[str, np.ndarray]
    files: tuple[Path, ...]
    base_sha256: str | None = None
    choices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    facts: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TaskForm:
    """How one model takes tasks of a ``kind``.

    ``tensors`` are parameters and constants of the module, by name, that every task has its own of. ``read(folder)``
    reads one; it raises CheckpointError for another model's, and for one whose structure engines do not have.
    ``reference(module)`` is what the gate compares with where that is not ``module`` with the task's tensors in it, and
    ``merged_workload`` the cost of a pass with a task in the weights, where it is another.
    """

    kind: TaskKind
    tensors: frozenset[str]
    read: Callable[[Path], Task]
    reference: Callable[[torch.nn.Module], torch.nn.Module] | None = None
    merged_workload: Callable[[Submodel, Bucket], list[Op]] | None = None


def hash_of(tensors: Mapping[str, np.ndarray]) -> str:
    """The hash of named float32 arrays: of each, by name, a line of JSON with name and shape, then its bytes
    (little-endian, row-major)."""
    digest = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        digest.update(json.dumps([name, list(array.shape)]).encode() + b"\n")
        digest.update(np.ascontiguousarray(array, np.dtype("<f4")).data)
    return digest.hexdigest()
