"""Parity again, on a bundle's written files, through the runtime that a device uses; with each of its tasks too."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..argument_types import checked
from ..bucket import Bucket
from ..bundle.device_files.task_index import read_tasks
from ..bundle.entries.task_entry import BASE, MergedTask
from ..bundle.open_bundle import Bundle
from ..errors import CheckpointError, ParityError
from ..exporters.sentence_transformers.library import is_installed
from ..exporters.source import ModelSource
from ..exporters.universal import UniversalModel, load_universal, permute_axis
from ..profiles.precision import PRECISIONS, TRACED
from ..progress import Progress, silent
from ..runtime.graphs.task_tensors import TaskTensors, read_task_tensors
from ..runtime.load import verify_bytes
from ..tables import as_html
from .engines.engine_references import EngineReferences, written_references
from .engines.kinds import KINDS, verify_engines
from .engines.whole import JudgedEngine, whole_verdict
from .graph.passes.contract import TRANSPOSED
from .graph.precision.proof_graphs import proof_bundle
from .graph.store import recover_order
from .job import stated_source
from .parity.cases import Case
from .parity.compare import tolerance_for
from .parity.engine_verdict import EngineVerdict, judged_outputs
from .parity.judge import Replayed, judge
from .parity.prove import judged_texts
from .parity.reference import Reference, in_torch, replayed
from .parity.references import References, references_at
from .work.clock import Clock
from .write_bundle import stated_entry


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """Truthy if nothing failed. Without a model to compare with, ``engines`` is empty: only bytes were checked, those
    of calibrated ``policies``, ``plans``, ``measurements`` of hosts and ``tasks`` too."""

    bundle: str
    files: int
    bytes: int
    against: str | None
    engines: tuple[EngineVerdict, ...]
    policies: int = 0
    plans: int = 0
    measurements: int = 0
    tasks: int = 0

    def __bool__(self) -> bool:
        return not any(verdict.problem for verdict in self.engines)

    def __repr__(self) -> str:
        failed = sum(verdict.problem is not None for verdict in self.engines)
        compared = f", {len(self.engines)} engines against {self.against}, {failed} failed" if self.against else ""
        return f"VerifyReport({self.bundle}: {self.files} files, {self.bytes / 1e6:.1f} MB{compared})"

    def _repr_html_(self) -> str:
        rows = [(verdict.engine, verdict.problem or "within tolerance") for verdict in self.engines]
        return as_html(repr(self), columns=("engine", "parity") if rows else (), rows=rows)


@checked
def verify_bundle(path: str | Path, against: Any = None, progress: Progress = silent) -> VerifyReport:
    """Checks every byte of a bundle, and with ``against`` (its model folder, or the torch.nn.Module that it was made
    of) every engine against PyTorch.

    An engine for TensorRT is checked as its graph, in ONNX Runtime; `nestforge build` checks plans against graphs.
    Raises BundleError if a file is damaged, CheckpointError if the bundle was not made from that model.
    """
    clock = Clock(progress)
    with clock("hashes"):
        checked = verify_bytes(path)
        bundle = checked.bundle
    verdicts: tuple[EngineVerdict, ...] = ()
    if against is not None:
        with clock("model"):
            universal = load_universal(stated_source(against, bundle.manifest))
            require_same_interface(universal, bundle)
            orders = recover_order(bundle.weights, universal)
        with clock("parity"), proof_bundle(bundle) as here:
            verdicts = _verify(here, universal, orders, clock)
    stated = against if against is None or isinstance(against, str | Path) else type(against).__name__
    model = None if stated is None else str(stated)
    return VerifyReport(str(bundle.path), against=model, engines=verdicts, **checked.counts)


def require_same_interface(universal: UniversalModel, bundle: Bundle) -> None:
    signature, manifest = universal.source.signature, bundle.manifest
    for what, found, expected in (
        ("axes", universal.spec.axes, manifest.axes),
        ("inputs", signature.inputs, manifest.inputs),
        ("outputs", signature.outputs, manifest.outputs),
        ("exits", universal.source.exits.entry if universal.source.exits else None, manifest.exits),
        ("settings of generation", *_generation(universal.source, bundle)),
    ):
        if found != expected:
            raise CheckpointError(
                f"{universal.source.checkpoint.folder}: its {what} are not those of {bundle.path}; the bundle was made "
                "from another model"
            )


def _generation(source: ModelSource, bundle: Bundle) -> tuple[object, object]:
    """How the model's folder says that it generates, and how the bundle does: both with the chat template."""
    entry = bundle.manifest.generation
    if entry is None or source.cached is None:
        return source.cached, entry
    file = entry.chat_template
    template = bundle.file(file).read_bytes() if file is not None else None
    stated, own = stated_entry(source)
    return (stated, own.encode() if own is not None else None), (entry.with_engines(()), template)


def _verify(
    bundle: Bundle, universal: UniversalModel, orders: Mapping[str, torch.Tensor], clock: Clock
) -> tuple[EngineVerdict, ...]:
    """The universal engines against the user's module as it is, then every engine in the bundle's order.

    Integers are held against their own numbers, in the bundle's order alone; there the module must answer as it is.
    """
    whole = universal.spec.universal()
    references = references_at(universal, {engine.bucket for engine in bundle.manifest.engines})
    as_loaded = Reference(universal.source.architecture.routing, universal.module, universal.source.signature.outputs)
    wholes = [one for one in bundle.manifest.engines if one.submodel == whole.id and one.segment is None]
    integers = [one for one in wholes if orders and PRECISIONS[one.precision].is_integer]
    untouched = [
        whole_verdict(bundle, universal, engine, own, partial(replayed, as_loaded, own), orders)
        for engine in wholes
        if not PRECISIONS[engine.precision].is_integer
        for own in (references.cases[engine.bucket],)
    ]
    buckets = {engine.bucket for engine in integers}
    loaded = {bucket: in_torch(as_loaded, references.cases[bucket]) for bucket in buckets}
    del as_loaded
    for axis, order in orders.items():
        permute_axis(universal, axis, order)
    limit = tolerance_for(TRACED, universal.spec.depth)
    for bucket in buckets:
        cases, (first, *others) = references.cases[bucket], [one for one in integers if one.bucket == bucket]
        expected = Replayed(loaded.pop(bucket), [{} for _ in cases])  # nothing is rounded
        found, outputs = in_torch(references.of(whole), cases), judged_outputs(bundle.manifest, universal, first)
        verdict = judge(expected, found, cases, outputs, limit)
        untouched += [EngineVerdict.of(engine, verdict) for engine in (first, *others)]
    with written_references(bundle, references) as own_references:
        verdicts = verify_engines(bundle, own_references, clock)
        if bundle.manifest.tasks is not None and bundle.manifest.tasks.merged:
            verdicts += verify_engines(bundle.with_merged(BASE), own_references, clock)
    failed = {verdict.engine: verdict for verdict in untouched if verdict.problem}
    engines = tuple(failed.get(verdict.engine, verdict) for verdict in verdicts)
    return (*engines, *verify_tasks(bundle, universal, references.cases, clock), *verify_texts(bundle, universal))


def verify_tasks(
    bundle: Bundle, universal: UniversalModel, cases: Mapping[Bucket, Sequence[Case]], clock: Clock
) -> tuple[EngineVerdict, ...]:
    """A verdict for every task on every engine that may answer for it; ``universal`` is in the bundle's order."""
    verdicts = []
    for task in read_tasks(bundle):
        tensors = read_task_tensors(bundle, task)
        references = EngineReferences(References(with_stored(universal, tensors), cases))
        try:
            for judged in judge_task(bundle, references, tensors, task.submodels, clock):
                verdict = EngineVerdict.of(judged.engine, judged.verdict)
                verdicts.append(replace(verdict, engine=f"{verdict.engine}, task {task.name}"))
        except ParityError as failure:
            verdicts.append(EngineVerdict(f"task {task.name}", (), str(failure)))
    return tuple(verdicts)


def verify_texts(bundle: Bundle, universal: UniversalModel) -> Iterator[EngineVerdict]:
    """A verdict on texts for every receipt of them, which says so where the library is not here."""
    if bundle.manifest.texts and not is_installed():
        receipts = bundle.manifest.texts
        yield from (EngineVerdict(f"{one.submodel}, texts", (), f"needs {one.library} to compare") for one in receipts)
    elif bundle.manifest.texts:
        for receipt, problem in judged_texts(bundle, universal):
            yield EngineVerdict(f"{receipt.submodel}, texts", receipt.outputs, problem)


def judge_task(
    bundle: Bundle, references: EngineReferences, task: TaskTensors, submodels: Collection[str], clock: Clock
) -> Iterator[JudgedEngine]:
    """Every engine of ``submodels``, those that keep a cache too, with the tensors of ``task``: then each that it is
    merged into.

    Raises ParityError for routes that no model of these shapes can take.
    """
    bundles, tasks = [bundle], bundle.manifest.tasks
    if tasks is not None and tasks.merged:
        bundles.append(bundle.with_merged(MergedTask(task.name, tasks.kind, task.arrays)))
    for own in bundles:
        for engine in clock.each([one for one in own.manifest.every_engine if one.submodel in submodels]):
            yield from KINDS[engine.kind.name].judge(own, references, engine, task)


def with_stored(universal: UniversalModel, task: TaskTensors) -> UniversalModel:
    """``universal`` with tensors as a bundle holds them."""
    values = {}
    for name, array in task.arrays.items():
        tensor = torch.from_numpy(array)
        values[name.removesuffix(TRANSPOSED)] = tensor.T.contiguous() if name.endswith(TRANSPOSED) else tensor
    return universal.with_parameters(values)
