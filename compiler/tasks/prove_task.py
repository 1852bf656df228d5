"""The gate of one task: every engine that may answer for it, with its tensors, against PyTorch with its tensors."""

from __future__ import annotations

from ...errors import ParityError
from ...runtime.bundle.device_files.task_index import TaskReceipt
from ...runtime.bundle.entries.engine_entry import EngineEntry
from ...runtime.bundle.manifest import WEIGHTS_NAME
from ...runtime.bundle.open_bundle import Bundle
from ...runtime.engines.contract.threads import threads_or_default
from ...runtime.engines.onnxruntime.runner import OnnxRuntimeRunner
from ...runtime.graphs.task_tensors import TaskTensors
from ...runtime.inputs.arrays import Arrays
from ..parity.engine_verdict import judge_engine, receipt_of, tolerance_of
from ..parity.evidence.reference import rule_of
from ..parity.evidence.references import References
from ..parity.judge import Verdict
from ..work.clock import Clock


def prove_task(
    bundle: Bundle, references: References, task: TaskTensors, submodels: tuple[str, ...], clock: Clock
) -> tuple[TaskReceipt, ...]:
    """A receipt for each engine of ``submodels`` (ids), run with the tensors of ``task``.

    ``references`` are those of the universal model with the same tensors, in the bundle's order.

    Raises ParityError for the first engine that breaks the rule of the gate.
    """
    engines = [engine for engine in bundle.manifest.engines if engine.submodel in submodels]
    receipts = []
    for engine in clock.each(engines):
        verdict = judge_task(bundle, references, task, engine)
        if verdict.broken is not None:
            limit = tolerance_of(engine, references.universal)
            raise ParityError(
                f"task {task.name}, engine {engine.id}: {verdict.broken.describe()}; allowed "
                f"{rule_of(limit, engine.routing)}"
            )
        receipts.append(_receipt(bundle, references, engine, verdict))
    return tuple(receipts)


def judge_task(bundle: Bundle, references: References, task: TaskTensors, engine: EngineEntry) -> Verdict:
    """One engine of ``bundle`` with the tensors of ``task``, on the cases of its bucket.

    Raises ParityError for routes that no model of these shapes can take.
    """
    universal = references.universal
    cases, limit = references.cases[engine.bucket], tolerance_of(engine, universal)
    names = [spec.name for spec in bundle.manifest.outputs] + [entry.name for entry in engine.routing or ()]
    with OnnxRuntimeRunner(bundle, engine, "shared", threads_or_default(None)) as opened:
        runner = opened.for_task(task)
        found: list[Arrays] = [dict(zip(names, runner.run(case.feeds, True), strict=True)) for case in cases]
    submodel = universal.spec.parse(engine.submodel)
    try:
        expected = references.replayed(submodel, engine.bucket, engine.routing, found, limit.atol)
    except ParityError as failure:
        raise ParityError(f"task {task.name}, engine {engine.id}: {failure}") from failure
    return judge_engine(bundle.manifest, universal, engine, cases, expected, found)


def _receipt(bundle: Bundle, references: References, engine: EngineEntry, verdict: Verdict) -> TaskReceipt:
    limit = tolerance_of(engine, references.universal)
    receipt = receipt_of(
        verdict,
        limit,
        references.cases[engine.bucket],
        reference=f"with the task's tensors, narrowed to {engine.submodel}, in float64",
        rule=rule_of(limit, engine.routing),
        graph_sha256=bundle.sha256(engine.file) or "",
        weights_sha256=bundle.sha256(WEIGHTS_NAME) or "",
    )
    return TaskReceipt(engine.id, receipt)
