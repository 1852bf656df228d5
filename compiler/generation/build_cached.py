"""The engines of a compile that generate: one for each submodel, emitted as every engine is, and proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...elastic import Bucket, Submodel
from ...errors import ParityError
from ...exporters.cached_form import CachedForm
from ...profiles.precision import PRECISIONS, TRACED, Precision
from ...runtime.bundle.manifest import CACHED, EngineEntry
from ...runtime.engines.runner import Residency
from ...runtime.inputs.arrays import Arrays
from ...strict import structure, unstructure
from ..build.build_engine import EngineBuilder, short
from ..build.emitted import Emitted
from ..parity.compare import tolerance_for
from ..parity.engine_verdict import tolerance_of
from ..parity.reference import Reference
from ..planning.cost_model import predict
from ..work.clock import Clock
from .cached_cases import Batch, cached_batches, cases_of, run_batches, unproven_window
from .cached_gate import (
    CachedRun,
    cached_reference,
    judge_cached,
    judge_rows,
    judged_specs,
    require_cached_parity,
)


def build_cached(builder: EngineBuilder, submodels: Sequence[Submodel], clock: Clock) -> tuple[EngineEntry, ...]:
    """An engine that keeps a cache for each of ``submodels``; none for a model that does not generate.

    Done work of an earlier run is kept. Raises ParityError naming the engine and the first module that diverges.
    """
    form = builder.universal.source.cached
    if form is None:
        return ()
    return tuple(_built(builder, form, submodel) for submodel in clock.each(submodels))


def _built(builder: EngineBuilder, form: CachedForm, submodel: Submodel) -> EngineEntry:
    name = f"{submodel.id}.{CACHED}@{form.bucket.label}"
    stem = f"{short(submodel.id)}.{CACHED}.{form.bucket.label}"
    file, receipt = f"{stem}.onnx", f"{stem}.json"
    builder.forget_unless(receipt, [file])
    data = builder.stage.once_json(receipt, lambda: unstructure(_build(builder, form, submodel, name, file)))
    return structure(EngineEntry, data, name, ParityError)


def _build(builder: EngineBuilder, form: CachedForm, submodel: Submodel, name: str, file: str) -> EngineEntry:
    emitted = builder.emit(name, file, submodel, form.bucket, CACHED)
    held = _activation_bytes(builder, form, submodel, emitted.entry.precision)
    engine = replace(emitted, entry=replace(emitted.entry, activation_bytes=held))
    entry, batches = engine.entry, cached_batches(form, long=submodel.is_universal)
    limit = tolerance_of(entry, builder.universal)
    verdict = judge_cached(builder.references, form, entry, batches, _answers(builder, form, entry, batches))
    reference = cached_reference(builder.references, submodel, form)
    run = CachedRun(
        f"engine {name}", engine.proof_graph, engine.template.module_outputs, builder.proofs.path, reference
    )
    require_cached_parity(run, form, batches, verdict, limit)
    rule = limit.rule
    if PRECISIONS[entry.precision].is_integer:
        rule = f"{rule}; without the rounding of activations, {_prove_exact(builder, form, engine, submodel, batches)}"
    if (unproven := unproven_window(form, batches)) is not None:
        rule = f"{rule}; {unproven}"
    reference_of = f"narrowed to {submodel.id}, one pass, in float64"
    return builder.with_receipt(engine, reference_of, rule, cases_of(batches), verdict)


def _activation_bytes(builder: EngineBuilder, form: CachedForm, submodel: Submodel, precision: Precision) -> int:
    """What activations of the longest run take. Attention is one operator and keeps its scores once. Logits are left
    out, the last product: a run computes few of them, into buffers of the caller's."""
    tokens = max(form.bucket.sequence, form.bucket.batch)
    ops = builder.universal.source.workload(submodel, Bucket(1, tokens))
    products = [op for op in ops if op.kind == "gemm"][:-1]
    scores = max((op.activation_bytes for op in ops if op.kind == "batched_gemm"), default=0)
    return predict(products, builder.profile, precision).activation_bytes + scores


def _prove_exact(
    builder: EngineBuilder, form: CachedForm, engine: Emitted, submodel: Submodel, batches: Sequence[Batch]
) -> str:
    """The rule that an integer engine keeps without the rounding of its activations; see ``ExactProof``."""
    limit = tolerance_for(TRACED, builder.universal.spec.depth)
    entry, graph = builder.prove_exact.graph(engine)
    module = form.recorded(builder.prove_exact.module(engine, submodel))
    reference = Reference(None, module, judged_specs(form.entry))
    verdict = judge_rows(reference, batches, _answers(builder, form, entry, batches), TRACED, limit)
    subject = f"engine {entry.id}, without the rounding of activations"
    run = CachedRun(subject, graph, engine.template.module_outputs, builder.proofs.path, reference)
    require_cached_parity(run, form, batches, verdict, limit)
    return limit.rule


def _answers(builder: EngineBuilder, form: CachedForm, engine: EngineEntry, batches: Sequence[Batch]) -> list[Arrays]:
    residency: Residency = "packed" if PRECISIONS[engine.precision].is_always_packed else "shared"
    with builder.runner(engine, residency) as runner:
        return run_batches(runner, engine, form.entry, batches)
