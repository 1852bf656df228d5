"""The gate of one task: every engine that may answer for it, with its tensors, against PyTorch with its tensors; when
it is added, and when a written bundle is verified."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ..bucket import Bucket
from ..bundle.device_files.task_index import TaskReceipt, read_tasks
from ..bundle.entries.task_entry import MergedTask
from ..bundle.manifest import WEIGHTS_NAME
from ..bundle.open_bundle import Bundle
from ..errors import ParityError
from ..exporters.universal import UniversalModel
from ..runtime.graphs.task_tensors import TaskTensors, read_task_tensors
from .engines.kinds import KINDS
from .engines.whole import JudgedEngine
from .graph.passes.contract import TRANSPOSED
from .parity.cases import Case
from .parity.engine_verdict import EngineVerdict, receipt_of, tolerance_of
from .parity.reference import rule_of
from .parity.references import References
from .work.clock import Clock


def prove_task(
    bundle: Bundle, references: References, task: TaskTensors, submodels: tuple[str, ...], clock: Clock
) -> tuple[TaskReceipt, ...]:
    """A receipt for each engine of ``submodels`` (ids), run with the tensors of ``task`` as inputs, or in its weights.

    ``references`` are those of the universal model with the same tensors, in the bundle's order.

    Raises ParityError for the first engine that breaks the rule of the gate.
    """
    receipts = []
    for judged in judge_task(bundle, references, task, submodels, clock):
        engine, verdict = judged.engine, judged.verdict
        if verdict.broken is not None:
            limit = tolerance_of(engine, references.universal)
            raise ParityError(
                f"task {task.name}, engine {engine.id}: {verdict.broken.describe()}; allowed "
                f"{rule_of(limit, engine.routing)}"
            )
        receipts.append(_receipt(bundle, references, judged))
    return tuple(receipts)


def judge_task(
    bundle: Bundle, references: References, task: TaskTensors, submodels: Collection[str], clock: Clock
) -> Iterator[JudgedEngine]:
    """Every engine of ``submodels``, those that keep a cache too, with the tensors of ``task``: then each that it is
    merged into.

    Raises ParityError for routes that no model of these shapes can take.
    """
    yield from _judged_as(bundle, references, task, submodels, clock)
    tasks = bundle.manifest.tasks
    if tasks is not None and tasks.merged:
        merged = bundle.with_merged(MergedTask(task.name, tasks.kind, task.arrays))
        yield from _judged_as(merged, references, task, submodels, clock)


def _judged_as(
    bundle: Bundle, references: References, task: TaskTensors, submodels: Collection[str], clock: Clock
) -> Iterator[JudgedEngine]:
    """The engines of ``bundle`` that take ``task`` as inputs, or have it in their weights."""
    for engine in clock.each([one for one in bundle.manifest.every_engine if one.submodel in submodels]):
        yield from KINDS[engine.kind.name].judge(bundle, references, engine, task)


def _receipt(bundle: Bundle, references: References, judged: JudgedEngine) -> TaskReceipt:
    engine = judged.engine
    limit = tolerance_of(engine, references.universal)
    receipt = receipt_of(
        judged.verdict,
        limit,
        judged.cases,
        reference=f"with the task's tensors, narrowed to {engine.submodel}, in float64",
        rule=rule_of(limit, engine.routing),
        graph_sha256=bundle.sha256(engine.file) or "",
        weights_sha256=bundle.sha256(WEIGHTS_NAME) or "",
    )
    return TaskReceipt(engine.id, receipt)


def verify_tasks(
    bundle: Bundle, universal: UniversalModel, cases: Mapping[Bucket, Sequence[Case]], clock: Clock
) -> tuple[EngineVerdict, ...]:
    """A verdict for every task on every engine that may answer for it; ``universal`` is in the bundle's order."""
    verdicts = []
    for task in read_tasks(bundle):
        tensors = read_task_tensors(bundle, task)
        references = References(with_stored(universal, tensors), cases)
        try:
            for judged in judge_task(bundle, references, tensors, task.submodels, clock):
                verdict = EngineVerdict.of(judged.engine, judged.verdict)
                verdicts.append(replace(verdict, engine=f"{verdict.engine}, task {task.name}"))
        except ParityError as failure:
            verdicts.append(EngineVerdict(f"task {task.name}", (), str(failure)))
    return tuple(verdicts)


def with_stored(universal: UniversalModel, task: TaskTensors) -> UniversalModel:
    """``universal`` with tensors as a bundle holds them."""
    values = {}
    for name, array in task.arrays.items():
        tensor = torch.from_numpy(array)
        values[name.removesuffix(TRANSPOSED)] = tensor.T.contiguous() if name.endswith(TRANSPOSED) else tensor
    return universal.with_parameters(values)
