"""How much of the universal model a submodel keeps, on texts or rows that no stage has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.manifest import Quality
from ...runtime.consistency.measure import measure
from ...runtime.consistency.samples import Samples, TextSamples
from ...runtime.device.threads import threads_or_default
from ...runtime.inputs.text import TextEncoder
from ...strict import structure, unstructure
from ..examples.corpus import ArrayCorpus, Corpus
from ..graph.precision.proof_graphs import in_onnx_runtime
from ..work.clock import Clock
from .build_engine import EngineBuilder
from .fp32_reference import Fp32Reference


def measure_quality(
    builder: EngineBuilder,
    encoder: TextEncoder | None,
    engines: Sequence[EngineEntry],
    corpus: Corpus | ArrayCorpus | None,
    clock: Clock,
    fp32: Fp32Reference | None = None,
) -> Mapping[str, Quality]:
    """Quality of every submodel against the universal model on what was held out; empty without data.

    Measured at the bucket with the longest sequence, to which texts are truncated for both models alike. A submodel of
    a shorter sequence runs at its own, the universal model at the bucket's, on the samples that fit the shorter: the
    requests that it may answer; it has no quality if none fits. The universal model computes in float32, in an engine
    of the bundle or in ``fp32``. What an earlier run measured is kept.
    """
    samples = _samples(encoder, corpus)
    if samples is None:
        return {}
    spec = builder.universal.spec
    bucket = max(builder.profile.buckets, key=lambda b: (b.sequence, -b.batch))
    universal = fp32.engine if fp32 else in_onnx_runtime(builder.build(spec.universal(), bucket))
    largest = [e for e in engines if e.segment is None and e.bucket == spec.parse(e.submodel).at(bucket)]
    wholes = [in_onnx_runtime(engine) for engine in largest]
    missing = [engine for engine in wholes if not (builder.stage.work / _receipt(engine)).exists()]
    reference = fp32.bundle if fp32 else builder.proofs
    measured = measure(builder.proofs, universal, missing, samples, threads_or_default(None), clock.tick, reference)
    found = {engine.submodel: _kept(builder, engine, quality) for engine, quality in measured}
    for engine in wholes:
        if engine not in missing:
            found[engine.submodel] = _kept(builder, engine, None)
    return {engine.submodel: found[engine.submodel] for engine in wholes if engine.submodel in found}


def _samples(encoder: TextEncoder | None, corpus: Corpus | ArrayCorpus | None) -> Samples | None:
    if isinstance(corpus, ArrayCorpus):
        return corpus.held_out
    return TextSamples(encoder, corpus.held_out) if corpus is not None and encoder is not None else None


def _receipt(engine: EngineEntry) -> str:
    return f"quality-{engine.file}.json"


def _kept(builder: EngineBuilder, engine: EngineEntry, quality: Quality | None) -> Quality:
    """The quality as its file has it, written now if it was measured now."""
    data = builder.stage.once_json(_receipt(engine), lambda: unstructure(quality))
    return structure(Quality, data, f"quality of {engine.submodel}", RuntimeError)
