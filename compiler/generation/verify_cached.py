"""The engines of a written bundle that generate, as users run them, against the PyTorch submodel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import ENCODER
from ...bundle.open_bundle import Bundle
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.runner import Runner, TakesTasks, runner_for
from ...runtime.graphs.task_tensors import TaskTensors
from ...runtime.inputs.arrays import Array
from ..parity.engine_verdict import EngineVerdict, judge_engine, tolerance_of
from ..parity.evidence.cached_cases import Batch, cached_batches, cases_of, prompts_of
from ..parity.evidence.cached_runs import PromptRoutes, prompt_routes, read_prompts, run_batches
from ..parity.evidence.cases import Case
from ..parity.evidence.reference import replayed
from ..parity.evidence.references import References
from ..parity.judge import Verdict
from ..work.clock import Clock
from .cached_gate import judge_cached


class JudgedEngine(NamedTuple):
    """What PyTorch says of ``engine`` on ``cases``."""

    engine: EngineEntry
    verdict: Verdict
    cases: Sequence[Case]


def verify_cached(bundle: Bundle, references: References, clock: Clock) -> list[EngineVerdict]:
    """One verdict for each; packed, where the gate of the build ran them shared."""
    generation = bundle.manifest.generation
    if generation is None or references.universal.source.cached is None:
        return []
    return [
        EngineVerdict.of(judged.engine, judged.verdict)
        for engine in clock.each(generation.engines)
        for judged in judge_generating(bundle, references, engine)
    ]


def judge_generating(
    bundle: Bundle, references: References, engine: EngineEntry, task: TaskTensors | None = None
) -> Iterator[JudgedEngine]:
    """An engine that keeps a cache, and before it the one that reads its prompts, if there is one; with the tensors of
    ``task``, else the base's. ``references`` are those of the universal model with the same."""
    generation, whole = bundle.manifest.generation, references.universal.source.cached
    assert generation is not None
    assert whole is not None
    submodel = references.universal.spec.parse(engine.submodel)
    entry, form = generation.of(engine), whole.at(submodel)
    if engine.capacity is not None:
        form = form.within(engine.capacity)
    batches = cached_batches(form.entry, long=submodel.is_universal)
    encoder, read, routes = generation.encoder_of(engine), None, None
    if encoder is not None:
        with _runner(bundle, encoder, task) as runner:
            read, routes = read_prompts(runner, entry, batches), prompt_routes(runner, encoder, batches)
        verdict = _of_encoder(bundle, references, encoder, batches, read, routes)
        yield JudgedEngine(encoder, verdict, prompts_of(batches))
    with _runner(bundle, engine, task) as runner:
        found = run_batches(runner, engine, entry, batches, read)
    yield JudgedEngine(engine, judge_cached(references, form, engine, batches, found, routes), cases_of(batches))


def _of_encoder(
    bundle: Bundle,
    references: References,
    engine: EngineEntry,
    batches: Sequence[Batch],
    read: Mapping[str, Sequence[Array]],
    routes: PromptRoutes | None,
) -> Verdict:
    universal, cases = references.universal, prompts_of(batches)
    part = universal.source.parts[ENCODER]
    module = references.of(universal.spec.parse(engine.submodel)).viewed(part.module, part.outputs)
    names = [spec.name for spec in part.outputs]
    found = [dict(zip(names, read[case.name], strict=True)) for case in cases]
    entries, taken = routes or PromptRoutes((), ())
    expected = replayed(module, cases, entries, taken, tolerance_of(engine, universal).atol)
    return judge_engine(bundle.manifest, universal, engine, cases, expected, found)


@contextmanager
def _runner(bundle: Bundle, engine: EngineEntry, task: TaskTensors | None) -> Iterator[Runner]:
    with runner_for(bundle, engine, "packed", threads_or_default(None)) as opened:
        if task is None:
            yield opened
        else:
            assert isinstance(opened, TakesTasks)
            yield opened.for_task(task)
