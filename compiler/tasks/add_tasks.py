"""Tasks added to a bundle whose files are written: each laid out, proven on those files, and listed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from ...bucket import Bucket
from ...bundle.device_files.task_index import (
    TaskEntry,
    keep_task,
    name_problem,
    read_tasks,
    require_new_name,
    task_file,
)
from ...bundle.manifest import FileEntry
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...errors import InputError
from ...exporters.architecture import Task
from ...exporters.checkpoints.checkpoint import sha256_of
from ...exporters.universal import UniversalModel
from ...runtime.graphs.task_tensors import task_tensors
from ..parity.evidence.cases import Case
from ..parity.evidence.references import References
from ..work.clock import Clock
from .prove_task import prove_task
from .task_layout import Orders, read_orders, task_bytes, with_task


def require_names(bundle: Bundle | None, names: Sequence[str]) -> None:
    """Raises InputError for a name that no task may have, or that two have, or that ``bundle`` has already."""
    for number, name in enumerate(names):
        if problem := name_problem(name):
            raise InputError(problem)
        if name.lower() in (other.lower() for other in names[:number]):
            raise InputError(f"task {name}: given twice; choose another name")
        if bundle is not None:
            require_new_name(read_tasks(bundle), name)


def orders_of(bundle: Bundle) -> Orders:
    """The orders in which the weights of ``bundle`` lie."""
    file = bundle.manifest.ranking.order_file
    return read_orders(None if file is None else bundle.file(file))


def add_tasks(
    bundle: Bundle,
    universal: UniversalModel,
    cases: Mapping[Bucket, Sequence[Case]],
    tasks: Mapping[str, Task],
    clock: Clock,
) -> None:
    """Adds ``tasks``, by name, to ``bundle``, which ``universal``, in its order, is the model of.

    Raises CheckpointError for a task of another base, InputError for one that no submodel of the bundle may answer for,
    ParityError where an engine with its tensors does not equal PyTorch; what is proven by then stays.
    """
    entry = bundle.manifest.tasks
    assert entry is not None
    for name, task in tasks.items():
        of_task = with_task(universal, task, orders_of(bundle), entry.base_sha256)
        data = task_bytes(of_task, entry)
        tensors = task_tensors(name, data, entry)  # as the runtime reads them
        submodels = _submodels(bundle, universal, name, task)
        receipts = prove_task(bundle, References(of_task, cases), tensors, submodels, clock)
        files = tuple(FileEntry(path.name, path.stat().st_size, sha256_of(path)) for path in task.files)
        digest = hashlib.sha256(data).hexdigest()
        kept = TaskEntry(name, task_file(name, data), len(data), digest, submodels, task.facts, files, receipts)
        keep_task(bundle, kept, data)


def _submodels(bundle: Bundle, universal: UniversalModel, name: str, task: Task) -> tuple[str, ...]:
    """Ids of the submodels that may answer for ``task``. Raises InputError if there is none."""
    built = [universal.spec.parse(entry.id) for entry in bundle.manifest.submodels]
    found = tuple(submodel.id for submodel in built if _is_offered(submodel, task))
    if not found:
        asked = "; ".join(f"{axis} {', '.join(map(str, values))}" for axis, values in task.choices.items())
        raise InputError(
            f"task {name}: {task.folder}: answers at {asked}; the bundle has {', '.join(s.id for s in built)}"
        )
    return found


def _is_offered(submodel: Submodel, task: Task) -> bool:
    return all(submodel[axis] in values for axis, values in task.choices.items())
