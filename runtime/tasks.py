"""The tasks of an open bundle: tensors read when a request first asks for one, and the engines that may answer it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..errors import InputError, SelectionError
from ..strict import nearest
from .bundle.device_files.task_index import TaskEntry, read_tasks
from .bundle.open_bundle import Bundle
from .dispatcher import Dispatcher
from .engines.contract.residency import Residency
from .graphs.task_tensors import TaskTensors, read_task_tensors
from .inputs.limits import positive_limit


class OpenTask(NamedTuple):
    """A task that requests can name: its tensors, and a dispatcher over the engines that it was proven on."""

    tensors: TaskTensors
    dispatcher: Dispatcher


class Tasks:
    """``dispatcher(residencies, task)`` chooses among the engines of ``residencies``, all of a task's. Thread-safe."""

    def __init__(
        self,
        bundle: Bundle,
        residencies: Mapping[str, Residency],
        dispatcher: Callable[[Mapping[str, Residency], TaskEntry], Dispatcher],
    ) -> None:
        """Raises BundleFormatError or BundleCorruptError for a damaged list of tasks."""
        self._bundle, self._residencies, self._dispatcher = bundle, residencies, dispatcher
        self._entries: dict[str, TaskEntry] = {task.name: task for task in read_tasks(bundle)}
        self._open: dict[str, OpenTask] = {}
        self._lock = threading.Lock()

    @property
    def entries(self) -> Mapping[str, TaskEntry]:
        """What the bundle states of each, by name."""
        return self._entries

    def open(self, name: str) -> OpenTask:
        """The task called ``name``. Raises SelectionError for an unknown one, BundleCorruptError for other bytes."""
        found = self._open.get(name) if isinstance(name, str) else None
        if found is not None:
            return found
        if not isinstance(name, str):
            raise InputError(f"task: expected a name, got {name!r:.80}")
        if name not in self._entries:
            raise SelectionError(
                f"no task {name!r:.80} in bundle {self._bundle.path}{nearest(name[:80], self._entries)}"
            )
        with self._lock:
            if name not in self._open:
                self._open[name] = self._opened(self._entries[name])
            return self._open[name]

    def _opened(self, task: TaskEntry) -> OpenTask:
        proven = {receipt.engine for receipt in task.parity}
        engines = {id_: residency for id_, residency in self._residencies.items() if id_ in proven}
        if not engines:
            raise SelectionError(
                f"task {task.name}: memory_mb leaves out every engine of its submodels, {', '.join(task.submodels)}"
            )
        return OpenTask(read_task_tensors(self._bundle, task), self._dispatcher(engines, task))


def bytes_of_tasks(bundle: Bundle, memory_mb: float) -> int:
    """What all tasks of ``bundle`` take. Raises SelectionError where the cap ``memory_mb`` leaves nothing beside."""
    taken = sum(task.bytes for task in read_tasks(bundle))
    if taken >= 1e6 * positive_limit("memory_mb", memory_mb):
        raise SelectionError(
            f"memory_mb={memory_mb:g}: the bundle's tasks alone take {taken / 1e6:.1f} MB; raise the cap"
        )
    return taken
