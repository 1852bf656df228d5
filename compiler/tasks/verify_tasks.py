"""The tasks of a written bundle against the PyTorch model with their tensors in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...elastic import Bucket
from ...errors import ParityError
from ...exporters.universal import UniversalModel
from ...runtime.bundle.device_files.task_index import read_tasks
from ...runtime.bundle.open_bundle import Bundle
from ...runtime.graphs.task_tensors import TaskTensors, read_task_tensors
from ..graph.passes.linear_to_gemm import TRANSPOSED
from ..parity.engine_verdict import EngineVerdict
from ..parity.evidence.cases import Case
from ..parity.evidence.references import References
from ..work.clock import Clock
from .prove_task import judge_task


def verify_tasks(
    bundle: Bundle, universal: UniversalModel, cases: Mapping[Bucket, Sequence[Case]], clock: Clock
) -> tuple[EngineVerdict, ...]:
    """A verdict for every task on every engine that may answer for it; ``universal`` is in the bundle's order."""
    verdicts = []
    for task in clock.each(read_tasks(bundle)):
        tensors = read_task_tensors(bundle, task)
        references = References(with_stored(universal, tensors), cases)
        for engine in bundle.manifest.engines:
            if engine.submodel not in task.submodels:
                continue
            name = f"{engine.id}, task {task.name}"
            try:
                verdict = judge_task(bundle, references, tensors, engine)
            except ParityError as failure:
                verdicts.append(EngineVerdict(name, (), str(failure)))
            else:
                problem = verdict.broken.describe() if verdict.broken is not None else None
                verdicts.append(EngineVerdict(name, verdict.outputs, problem, verdict.routes))
    return tuple(verdicts)


def with_stored(universal: UniversalModel, task: TaskTensors) -> UniversalModel:
    """``universal`` with tensors as a bundle holds them."""
    values = {}
    for name, array in task.arrays.items():
        tensor = torch.from_numpy(array)
        values[name.removesuffix(TRANSPOSED)] = tensor.T.contiguous() if name.endswith(TRANSPOSED) else tensor
    return universal.with_parameters(values)
