"""The tasks of a bundle: ``tasks.json`` lists them, each with the file of its tensors and its own receipts.

A bundle gets tasks long after its manifest (`nestforge add-task`), so that the list vouches for itself by a seal, as
calibrations do (device_file.py), and is replaced in one step: what stood in it before stays as it was.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ...errors import InputError
from ...profiles.compile_request import name_problem, require_names
from ...whole_file import alone, write_whole
from ..entries.engine_entry import ParityReceipt
from ..manifest import TASKS_NAME, FileEntry
from ..open_bundle import Bundle
from ..read_manifest import is_plain_name
from .device_file import DeviceRecord

TASK_FILE_PREFIX, TASK_FILE_SUFFIX = "task.", ".safetensors"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_TASKS = 4096


@dataclass(frozen=True)
class TaskReceipt:
    """The proof of one task on one engine, by its id."""

    engine: str
    parity: ParityReceipt


@dataclass(frozen=True)
class TaskEntry:
    """One task: ``bytes`` of tensors in ``file``, and the ``submodels`` (ids) that may answer for it, each proven.

    ``facts`` are what its folder states, such as the rank of its matrices; ``source`` are the folder's files.
    """

    name: str
    file: str
    bytes: int = field(metadata={"min": 1})
    sha256: str
    submodels: tuple[str, ...]
    facts: Mapping[str, int | str]
    source: tuple[FileEntry, ...]
    parity: tuple[TaskReceipt, ...]


@dataclass(frozen=True)
class TaskIndex(DeviceRecord):
    """The tasks of one bundle, by name."""

    name = TASKS_NAME
    mend = "remove it and add the tasks again"

    tasks: tuple[TaskEntry, ...]

    def problems(self, bundle: Bundle) -> Iterable[str]:
        """Names confined to the folder, submodels and engines that exist."""
        if self.tasks and bundle.manifest.tasks is None:
            yield "the engines of this bundle take no tasks"
        submodels = {entry.id for entry in bundle.manifest.submodels}
        engines = {engine.id: engine for engine in bundle.manifest.listed_engines}
        seen: set[str] = set()
        for task in self.tasks:
            if problem := name_problem(task.name):
                yield problem
            for name in (task.name.lower(), task.file.lower()):
                if name in seen:
                    yield f"task {task.name}: {name} stands twice"
                seen.add(name)
            if not (is_plain_name(task.file) and _is_task_file(task.file)):
                yield (
                    f"task {task.name}: file {task.file[:80]!r}; expected a plain name such as "
                    "task.NAME.HASH.safetensors"
                )
            if not _SHA256.fullmatch(task.sha256):
                yield f"task {task.name}: sha256 {task.sha256[:80]!r}; expected 64 lower-case hexadecimal digits"
            if not task.submodels or not submodels.issuperset(task.submodels):
                yield f"task {task.name}: submodels {', '.join(task.submodels)[:80]!r} are not all in the manifest"
            proven = {receipt.engine for receipt in task.parity}
            own = {id_ for id_, engine in engines.items() if engine.submodel in task.submodels}
            if proven != own or len(proven) != len(task.parity):
                yield f"task {task.name}: receipts; expected one for every engine of its submodels"


def read_tasks(bundle: Bundle) -> tuple[TaskEntry, ...]:
    """The tasks that a bundle's folder lists; none where it has no list.

    Raises BundleFormatError for what is malformed, BundleCorruptError for a wrong seal or a list of another bundle.
    """
    index = TaskIndex.read(bundle)
    return index.tasks if index is not None else ()


def save_task_entry(bundle: Bundle, task: TaskEntry, tensors: bytes) -> None:
    """Adds ``task`` with the file of its ``tensors`` to the bundle: that first, then the list, each in one step.

    Raises InputError for a name that the bundle has, OutputError where it cannot be written.
    """
    with alone(bundle.path):
        kept = read_tasks(bundle)
        require_names([task.name], (one.name for one in kept))
        if len(kept) == _MAX_TASKS:
            raise InputError(f"bundle {bundle.path}: has {_MAX_TASKS} tasks, and takes no more")
        path, lost = bundle.path / task.file, f"task {task.name}"
        try:
            write_whole(path, lambda stream: stream.write(tensors), lost)
            ordered = tuple(sorted((*kept, task), key=lambda one: one.name))
            TaskIndex.made_for(bundle, ordered).write(bundle, lost)
        except BaseException:
            if all(one.file != task.file for one in read_tasks(bundle)):  # else it came after the list's new name
                with suppress(OSError):  # what refused the list may refuse this too; the first refusal is said
                    path.unlink(missing_ok=True)
            raise


def task_file(name: str, tensors: bytes) -> str:
    """File name of a task with these bytes."""
    return f"{TASK_FILE_PREFIX}{name}.{hashlib.sha256(tensors).hexdigest()[:16]}{TASK_FILE_SUFFIX}"


def _is_task_file(name: str) -> bool:
    """Whether a file of a bundle's folder is called as those of tasks are."""
    return name.startswith(TASK_FILE_PREFIX) and name.endswith(TASK_FILE_SUFFIX)
