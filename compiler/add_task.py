"""A job: one more task for a bundle, laid out as its engines take it, proven against PyTorch on the written files, and
listed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.numpy import save as save_bytes

from ..argument_types import checked
from ..bucket import Bucket
from ..bundle.device_files.task_index import TaskEntry, TaskReceipt, read_tasks, save_task_entry, task_file
from ..bundle.entries.task_entry import TasksEntry, TaskTensor
from ..bundle.manifest import FileEntry
from ..bundle.open_bundle import Bundle, open_bundle
from ..elastic import Submodel
from ..errors import BundleIncompatibleError, CheckpointError, InputError, ParityError
from ..exporters.architecture import Task
from ..exporters.checkpoints.checkpoint import sha256_of
from ..exporters.universal import UniversalModel, load_universal, permute_axis, permuted_steps
from ..profiles.compile_request import require_names
from ..progress import Progress, silent
from ..runtime.graphs.task_tensors import TaskTensors, task_tensors
from ..whole_file import require_writable
from .engines.engine_references import EngineReferences
from .engines.whole import JudgedEngine
from .graph.store import Store, laid_out, stored_name
from .job import stated_source
from .parity.cases import Case
from .parity.engine_verdict import receipt_of, tolerance_of
from .parity.reference import rule_of
from .parity.references import References, references_at
from .verify import judge_task, require_same_interface
from .work.clock import Clock

# By order of the spec: the step of the checkpoint that lies at each place.
Orders = Mapping[str, np.ndarray]


@checked
def add_task(
    bundle: str | Path, name: str, folder: str | Path, against: str | Path, progress: Progress = silent
) -> Path:
    """Adds the task in ``folder`` to ``bundle`` under ``name``, and returns the bundle's path; ``against`` is the model
    folder of the bundle's base, for PyTorch's side of the gate.

    The bundle's manifest, engines and tasks stay untouched. Where anything is refused nothing is added.
    Raises BundleError, CheckpointError for another base or a folder that is none of its tasks, InputError for a name
    that is taken, ParityError where an engine with the task's tensors does not equal PyTorch, OutputError.
    """
    clock, opened = Clock(progress), open_bundle(bundle)
    if opened.manifest.tasks is None:
        raise BundleIncompatibleError(
            f"bundle {bundle}: its engines take no tasks; compile it with `tasks`, which makes engines that do"
        )
    require_names([name], (task.name for task in read_tasks(opened)))
    require_writable(opened.path, f"task {name}")
    with clock("model"):
        source = stated_source(against, opened.manifest)
        assert source.tasks is not None
        task = source.tasks.read(Path(folder))
        universal = load_universal(source)
        require_same_interface(universal, opened)
        _require_base(universal, opened)
        for axis, places in orders_of(opened).items():
            permute_axis(universal, axis, torch.from_numpy(places).long())
    with clock("parity"):
        cases = references_at(universal, {engine.bucket for engine in opened.manifest.engines}).cases
        add_tasks(opened, universal, cases, {name: task}, clock)
    return opened.path


def _require_base(universal: UniversalModel, bundle: Bundle) -> None:
    stated, found = bundle.manifest.tasks, universal.frozen_sha256()
    if stated is not None and found != stated.base_sha256:
        raise CheckpointError(
            f"{universal.source.checkpoint.folder}: its frozen weights have the hash {found[:16]}..., those of "
            f"{bundle.path} {stated.base_sha256[:16]}...; the bundle was made from another model"
        )


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
        receipts = prove_task(bundle, EngineReferences(References(of_task, cases)), tensors, submodels, clock)
        files = tuple(FileEntry(path.name, path.stat().st_size, sha256_of(path)) for path in task.files)
        digest = hashlib.sha256(data).hexdigest()
        kept = TaskEntry(name, task_file(name, data), len(data), digest, submodels, task.facts, files, receipts)
        save_task_entry(bundle, kept, data)


def prove_task(
    bundle: Bundle, references: EngineReferences, task: TaskTensors, submodels: tuple[str, ...], clock: Clock
) -> tuple[TaskReceipt, ...]:
    """A receipt for each engine of ``submodels`` (ids), run with the tensors of ``task`` as inputs, or in its weights.

    ``references`` are those of the universal model with the same tensors, in the bundle's order.

    Raises ParityError for the first engine that breaks the rule of the gate.
    """
    receipts = []
    for judged in judge_task(bundle, references, task, submodels, clock):
        engine, verdict = judged.engine, judged.verdict
        if verdict.broken is not None:
            limit = tolerance_of(engine, references.of_model.universal)
            raise ParityError(
                f"task {task.name}, engine {engine.id}: {verdict.broken.describe()}; allowed "
                f"{rule_of(limit, engine.routing)}"
            )
        receipts.append(_receipt(bundle, references, judged))
    return tuple(receipts)


def _receipt(bundle: Bundle, references: EngineReferences, judged: JudgedEngine) -> TaskReceipt:
    engine = judged.engine
    limit = tolerance_of(engine, references.of_model.universal)
    receipt = receipt_of(
        judged.verdict,
        limit,
        judged.cases,
        reference=f"with the task's tensors, narrowed to {engine.submodel}, in float64",
        rule=rule_of(limit, engine.routing),
        graph_sha256=bundle.sha256(engine.file) or "",
        weights_sha256=bundle.manifest.weights_sha256 or "",
    )
    return TaskReceipt(engine.id, receipt)


def _submodels(bundle: Bundle, universal: UniversalModel, name: str, task: Task) -> tuple[str, ...]:
    """Ids of the submodels that may answer for ``task``. Raises InputError if there is none."""
    built = [universal.spec.parse(entry.id) for entry in bundle.manifest.submodels]
    found = tuple(submodel.id for submodel in built if _is_offered(submodel, task))
    if not found:
        offered = "; ".join(f"{axis} {', '.join(map(str, values))}" for axis, values in task.choices.items())
        raise InputError(
            f"task {name}: {task.folder}: answers at {offered}; the bundle has {', '.join(s.id for s in built)}"
        )
    return found


def _is_offered(submodel: Submodel, task: Task) -> bool:
    return all(submodel[axis] in values for axis, values in task.choices.items())


def tasks_entry(universal: UniversalModel, store: Store, base_sha256: str) -> TasksEntry | None:
    """The manifest's part on tasks: the tensors of theirs that engines read. None for a model without tasks."""
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


def with_task(universal: UniversalModel, task: Task, orders: Orders, base_sha256: str) -> UniversalModel:
    """``universal``, in the bundle's order, with the tensors of ``task`` in that order as well.

    Raises CheckpointError for a task of another base.
    """
    task.require_base(base_sha256)
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
