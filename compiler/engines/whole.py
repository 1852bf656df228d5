"""Whole engines verified: as users run them, and with the tensors of a task."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ...bundle.entries.engine_entry import EngineEntry, RoutingEntry
from ...bundle.open_bundle import Bundle
from ...errors import ParityError
from ...exporters.universal import UniversalModel
from ...profiles.precision import PRECISIONS
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.onnxruntime.runner import OnnxRuntimeRunner
from ...runtime.engines.residency import Residency
from ...runtime.graphs.task_tensors import TaskTensors
from ...runtime.inputs.arrays import Arrays
from ...runtime.model import ElasticModel
from ..parity.cases import Case
from ..parity.engine_verdict import EngineVerdict, judge_engine, tolerance_of
from ..parity.judge import Replayed, Verdict
from .engine_references import EngineReferences


class JudgedEngine(NamedTuple):
    """PyTorch's ``verdict`` on ``engine``, on ``cases``."""

    engine: EngineEntry
    verdict: Verdict
    cases: Sequence[Case]


def verify_whole(bundle: Bundle, references: EngineReferences, engine: EngineEntry) -> Iterator[EngineVerdict]:
    """A whole engine of a written bundle against its submodel."""
    own = references.of(bundle, engine)
    submodel = own.universal.spec.parse(engine.submodel)
    replay, cases = partial(own.replayed, submodel, engine.bucket), own.asked(submodel, engine.bucket)
    yield whole_verdict(bundle, own.universal, engine, cases, replay, residency=residency_of(references, engine))


def residency_of(references: EngineReferences, engine: EngineEntry) -> Residency:
    """How a written engine is asked: packed, or of a large model in the last verification of a compile as the gate ran
    it, since a copy of all its weights takes longer than the few cases."""
    own = references.of_model
    return "shared" if own.looks and not own.of_all and not PRECISIONS[engine.precision].is_always_packed else "packed"


def whole_verdict(
    bundle: Bundle,
    universal: UniversalModel,
    engine: EngineEntry,
    cases: Sequence[Case],
    replay: Callable[[Sequence[RoutingEntry] | None, Sequence[Arrays], float], Replayed],
    orders: Mapping[str, torch.Tensor] | None = None,
    residency: Residency = "packed",
) -> EngineVerdict:
    """One whole engine on ``cases``, answered as a request for its submodel at exactly its bucket.

    Packed, as users run it while memory lasts; the gate of the build ran it shared, so that both forms are proven but
    where the ``residency`` is another.
    ``replay`` is the reference, given the routes that the engine took, and by how much they may be worse. ``orders``
    are the bundle's where the reference does not have them.
    """
    decides = bool(engine.routing)
    with ElasticModel(bundle, {engine.id: residency}, threads_or_default(None)) as model:
        ask = partial(model, submodel=engine.submodel, exits="off", routing=decides)
        found = [
            case.judged({**answer.outputs, **(answer.routing or {})}, bundle.manifest.outputs)
            for case in cases
            for answer in (ask(case.request),)
        ]
    limit = tolerance_of(engine, universal)
    decided = [_as_loaded(universal, engine, arrays, orders or {}) for arrays in found]
    try:
        expected = replay(engine.routing, decided, limit.atol)
    except ParityError as failure:
        return EngineVerdict(engine.id, (), str(failure))
    return EngineVerdict.of(engine, judge_engine(bundle.manifest, universal, engine, cases, expected, found))


def _as_loaded(
    universal: UniversalModel, engine: EngineEntry, found: Arrays, orders: Mapping[str, torch.Tensor]
) -> Arrays:
    """The arrays ``found``, with steps of routes that the bundle has permuted where the model's files have them."""
    routing, arrays = universal.source.architecture.routing, dict(found)
    for entry in engine.routing or ():
        for dim, name in (routing.orders(entry.name) if routing is not None else {}).items():
            if name in orders:
                permuted = torch.from_numpy(arrays[entry.name])
                arrays[entry.name] = torch.empty_like(permuted).index_copy(dim, orders[name], permuted).numpy()
    return arrays


def judge_whole(
    bundle: Bundle, references: EngineReferences, engine: EngineEntry, task: TaskTensors
) -> Iterator[JudgedEngine]:
    """A whole engine with the tensors of ``task``, as inputs or merged into its weights, on the cases of its bucket."""
    own = references.of(bundle, engine)
    universal = own.universal
    cases, limit = own.cases[engine.bucket], tolerance_of(engine, universal)
    names = [spec.name for spec in bundle.manifest.outputs] + [entry.name for entry in engine.routing or ()]
    # Merged ones are always packed; the others are opened so by `verify`.
    residency: Residency = "shared" if bundle.merged is None else "packed"
    with OnnxRuntimeRunner(bundle, engine, residency, threads_or_default(None)) as opened:
        runner = opened.for_task(task) if bundle.merged is None else opened
        found: list[Arrays] = [dict(zip(names, runner.run(case.feeds, True), strict=True)) for case in cases]
    submodel = universal.spec.parse(engine.submodel)
    try:
        expected = own.replayed(submodel, engine.bucket, engine.routing, found, limit.atol)
    except ParityError as failure:
        raise ParityError(f"task {task.name}, engine {engine.id}: {failure}") from failure
    yield JudgedEngine(engine, judge_engine(bundle.manifest, universal, engine, cases, expected, found), cases)
