"""The tasks of a written bundle against the PyTorch model with their tensors in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...bucket import Bucket
from ...bundle.device_files.task_index import read_tasks
from ...bundle.open_bundle import Bundle
from ...errors import ParityError
from ...exporters.universal import UniversalModel
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
