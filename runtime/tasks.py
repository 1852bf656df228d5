"""The tasks of an open bundle: tensors read when a request first names one, or merged into the weights of engines of
their own, which no other task shares."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..argument_types import positive_limit
from ..bundle.device_files.task_index import TaskEntry, read_tasks
from ..bundle.entries.task_entry import MergedTask
from ..bundle.open_bundle import Bundle
from ..errors import BundleIncompatibleError, InputError, SelectionError
from ..strict import nearest
from .dispatcher import Dispatcher
from .engines.memory import engine_needs
from .engines.residency import Residency
from .engines.runner import EnginePool
from .graphs.task_tensors import TaskTensors, read_task_tensors


class OpenTask(NamedTuple):
    """A task that requests can name: its tensors, a dispatcher over the engines that it was proven on, and what opens
    these: the pool of the base, or one whose engines have the task in their weights."""

    tensors: TaskTensors
    dispatcher: Dispatcher
    pool: EnginePool


class Tasks:
    """``dispatcher(manifest, residencies, task=)`` chooses among the engines of ``residencies``, all of a task's and of
    ``manifest``. ``pool`` opens those that take tasks as inputs, and ``merged``, by name, those of merged ones.
    Thread-safe."""

    def __init__(
        self,
        bundle: Bundle,
        pool: EnginePool,
        merged: Mapping[str, EnginePool],
        dispatcher: Callable[..., Dispatcher],
    ) -> None:
        """Raises BundleFormatError or BundleCorruptError for a damaged list of tasks."""
        self._bundle, self._pool, self._merged, self._dispatcher = bundle, pool, merged, dispatcher
        listed = read_tasks(bundle) if bundle.merged is None else ()
        self._entries: dict[str, TaskEntry] = {task.name: task for task in listed}
        self._open: dict[str, OpenTask] = {}
        self._lock = threading.Lock()

    @property
    def entries(self) -> Mapping[str, TaskEntry]:
        """The bundle's entry of each, by name."""
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
        pool = self._merged.get(task.name, self._pool)
        engines = {id_: residency for id_, residency in pool.residencies.items() if id_ in proven}
        if not engines:
            raise SelectionError(
                f"task {task.name}: memory_mb leaves out every engine of its submodels, {', '.join(task.submodels)}"
            )
        dispatcher = self._dispatcher(pool.bundle.manifest, engines, task=task)
        return OpenTask(read_task_tensors(self._bundle, task), dispatcher, pool)


def bytes_of_tasks(bundle: Bundle, memory_mb: float, of_merged: int) -> int:
    """Bytes of all tasks of ``bundle``, with ``of_merged`` bytes of engines that some are merged into.

    Raises SelectionError where the cap ``memory_mb`` leaves nothing beside.
    """
    taken = sum(task.bytes for task in read_tasks(bundle)) + of_merged
    if taken >= 1e6 * positive_limit("memory_mb", memory_mb):
        merged = f", {of_merged / 1e6:.1f} MB of it merged ones; merge fewer, or" if of_merged else ";"
        raise SelectionError(
            f"memory_mb={memory_mb:g}: the bundle's tasks alone take {taken / 1e6:.1f} MB{merged} raise the cap"
        )
    return taken


def merged_bundles(bundle: Bundle, names: Sequence[str]) -> dict[str, Bundle]:
    """By name the bundle as the engines of that task alone, with its tensors in their weights.

    Raises InputError for what is no list of names, SelectionError for a name that the bundle does not have,
    BundleIncompatibleError where it has no engines to merge into, BundleCorruptError for tensors that are not its own.
    """
    is_list = isinstance(names, Collection) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise InputError(f"merge: expected a list of tasks by name, got {names!r:.80}")
    if not names:
        return {}
    stated = bundle.manifest.tasks
    known = {task.name: task for task in read_tasks(bundle)}
    for name in names:
        if name not in known:
            raise SelectionError(f"merge: no task {name!r:.80} in bundle {bundle.path}{nearest(name[:80], known)}")
    if stated is None or not stated.merged:
        raise BundleIncompatibleError(
            f"merge: bundle {bundle.path} has no engines that a task can be merged into; compile it with "
            "`mergeable=True`"
        )
    found = {}
    for name in names:
        tensors = read_task_tensors(bundle, known[name])
        found[name] = bundle.with_merged(MergedTask(name, stated.kind, tensors.arrays))
    return found


def packed(bundle: Bundle) -> dict[str, Residency]:
    """The residency of whole engines that a task is merged into: they own their weights whatever is requested."""
    return {engine.id: "packed" for engine in bundle.manifest.engines}


def merged_bytes(merged: Iterable[Bundle]) -> int:
    """Bytes of the whole engines of all of ``merged`` once they are open."""
    return sum(need.weight_bytes + need.own_bytes for one in merged for need in engine_needs(one, one.manifest.engines))


def require_no_cap(merged: Mapping[str, Bundle], bundle: Bundle, memory_mb: float | None) -> None:
    """Raises InputError for a cap beside merged tasks that generate, whose engines and caches it does not count."""
    if merged and memory_mb is not None and bundle.manifest.generation is not None:
        raise InputError(
            "memory_mb: a cap does not count engines and caches of merged tasks that generate; load without it, or "
            "without merge"
        )
