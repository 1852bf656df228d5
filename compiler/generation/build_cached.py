"""The engines of a compile that generate: one for each submodel, emitted as every engine is, and proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...elastic import Submodel
from ...errors import ParityError
from ...exporters.cached_form import CachedForm
from ...runtime.bundle.manifest import CACHED, EngineEntry, ParityReceipt
from ...strict import structure, unstructure
from ..build.build_engine import EngineBuilder, short
from ..parity.engine_verdict import tolerance_of
from ..work.clock import Clock
from .cached_cases import cached_batches, cases_of, run_batches
from .cached_gate import judge_cached, require_cached_parity


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
    engine = builder.emit(name, file, submodel, form.bucket, CACHED)
    batches = cached_batches(form, long=submodel.is_universal)
    with builder.runner(engine.entry, "shared") as runner:
        found = run_batches(runner, engine.entry, form.entry, batches)
    verdict = judge_cached(builder.references, form, engine.entry, batches, found)
    require_cached_parity(builder.references, form, engine, builder.proofs.path, batches, verdict)
    limit = tolerance_of(engine.entry, builder.universal)
    return replace(
        engine.entry,
        parity=ParityReceipt(
            reference=f"PyTorch {torch.__version__} module narrowed to {submodel.id}, one pass, in float64",
            rule=limit.rule,
            atol=limit.atol,
            rtol=limit.rtol,
            min_cosine=limit.min_cosine,
            cases=tuple(case.name for case in cases_of(batches)),
            outputs=verdict.outputs,
            graph_sha256=engine.graph_sha256,
            weights_sha256=builder.weights_sha256,
            rms=limit.rms,
        ),
    )
