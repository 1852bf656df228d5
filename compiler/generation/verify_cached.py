"""The engines of a written bundle that generate, as users run them, against the PyTorch submodel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...runtime.bundle.entries.engine_entry import EngineEntry
from ...runtime.bundle.entries.generation_entry import ENCODER
from ...runtime.bundle.open_bundle import Bundle
from ...runtime.engines.contract.threads import threads_or_default
from ...runtime.engines.runner import Runner, runner_for
from ...runtime.inputs.arrays import Array
from ..parity.engine_verdict import EngineVerdict, judge_engine
from ..parity.evidence.reference import replayed
from ..parity.evidence.references import References
from ..work.clock import Clock
from .cached_cases import Batch, cached_batches, prompts_of, read_prompts, run_batches
from .cached_gate import judge_cached


def verify_cached(bundle: Bundle, references: References, clock: Clock) -> list[EngineVerdict]:
    """One verdict for each; packed, where the gate of the build ran them shared."""
    generation, whole = bundle.manifest.generation, references.universal.source.cached
    if generation is None or whole is None:
        return []
    verdicts = []
    encoders = {engine.submodel: engine for engine in generation.encoder.engines} if generation.encoder else {}
    for engine in clock.each(generation.engines):
        submodel = references.universal.spec.parse(engine.submodel)
        entry, form = generation.of(engine), whole.at(submodel)
        if engine.capacity is not None:
            form = form.within(engine.capacity)
        batches = cached_batches(form, long=submodel.is_universal)
        read = None
        if engine.submodel in encoders:
            with _runner(bundle, encoders[engine.submodel]) as runner:
                read = read_prompts(runner, entry, batches)
            verdicts.append(_of_encoder(bundle, references, encoders[engine.submodel], batches, read))
        with _runner(bundle, engine) as runner:
            found = run_batches(runner, engine, entry, batches, read)
        verdicts.append(EngineVerdict.of(engine, judge_cached(references, form, engine, batches, found)))
    return verdicts


def _of_encoder(
    bundle: Bundle,
    references: References,
    engine: EngineEntry,
    batches: Sequence[Batch],
    read: Mapping[str, Sequence[Array]],
) -> EngineVerdict:
    universal, cases = references.universal, prompts_of(batches)
    part = universal.source.parts[ENCODER]
    module = references.of(universal.spec.parse(engine.submodel)).viewed(part.module, part.outputs)
    names = [spec.name for spec in part.outputs]
    found = [dict(zip(names, read[case.name], strict=True)) for case in cases]
    verdict = judge_engine(bundle.manifest, universal, engine, cases, replayed(module, cases), found)
    return EngineVerdict.of(engine, verdict)


def _runner(bundle: Bundle, engine: EngineEntry) -> Runner:
    return runner_for(bundle, engine, "packed", threads_or_default(None))
