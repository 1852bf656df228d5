"""The engines that generate: one for each submodel, emitted as every engine is, proven, and verified as written.

An encoder-decoder has two: the encoder, proven as a part of the model, and the decoder on what that returned.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch

from ...bucket import Bucket
from ...bundle.entries.engine_entry import Decode, Encoder, EngineEntry
from ...bundle.entries.generation_entry import CACHED, ENCODER, CachedLayer, GenerationEntry
from ...bundle.open_bundle import Bundle
from ...elastic import Submodel
from ...exporters.parts import CachedSpec
from ...exporters.universal import UniversalModel
from ...profiles.precision import PRECISIONS, Precision
from ...runtime.device.threads import threads_or_default
from ...runtime.engines.residency import Residency
from ...runtime.engines.runner import Runner, TakesTasks, runner_for
from ...runtime.graphs.task_tensors import TaskTensors
from ...runtime.inputs.arrays import Array, Arrays
from ..graph.template import Emitted
from ..parity.cached_cases import (
    Batch,
    PromptRoutes,
    cached_batches,
    cases_of,
    judged_specs,
    prompt_in,
    prompt_routes,
    prompts_of,
    read_prompts,
    run_batches,
    unproven_window,
)
from ..parity.cases import unjudged
from ..parity.engine_verdict import EngineVerdict, ProofRun, judge_engine, tolerance_of
from ..parity.judge import JudgedOutputs, Verdict, distance
from ..parity.reference import Reference, in_torch, replayed
from ..parity.references import References
from ..planning.cost_model import predict
from .build_engine import EngineBuilder
from .cached_gate import (
    cached_answers,
    cached_reference,
    judge_cached,
    judge_rows,
    require_cached_parity,
)
from .engine_references import EngineReferences, require_form
from .whole import JudgedEngine, residency_of

# Outputs of an encoder for each prompt, by the name of its case; None for a model without one.
_Read = Mapping[str, Sequence[Array]] | None
# Runs of a text that a large model without the rounding of its activations is asked in.
_FEW_PIECES = 3
# Tokens of a text of a large model that is not long, and of one of its narrower widths.
_FEW_TOKENS, _FEWEST_TOKENS = 16, 12
_HEADS, _SIZES = attrgetter("heads"), attrgetter("size")


def build_generating(builder: EngineBuilder, submodel: Submodel, _: Bucket) -> list[EngineEntry]:
    """The engines of ``submodel`` that keep a cache, one for each capacity of the profile, and one that reads prompts
    where the model has an encoder; none for a model that does not generate.

    Done work of an earlier run is kept. Raises ParityError naming the engine and the first module that diverges.
    """
    form = builder.universal.source.cached
    if form is None:
        return []
    batches = _texts(builder.universal, form.entry, submodel, submodel.is_universal)
    form = form.at(submodel)
    read: _Read = None
    routes: PromptRoutes | None = None
    encoders, engines = list[EngineEntry](), list[EngineEntry]()
    if form.encoder is not None:
        build_encoder = partial(_build_encoder, builder, form, submodel, batches)
        encoders.append(_once(builder, submodel, ENCODER, form.encoder.bucket, build_encoder))
        with builder.runner(encoders[0]) as runner:
            read = read_prompts(runner, form.entry, batches)
            routes = prompt_routes(runner, encoders[0], batches)
    for capacity in builder.profile.capacities_for(form.positions):
        own, texts = form, batches
        if capacity is not None:
            own = form.within(capacity)
            texts = _texts(builder.universal, own.entry, submodel, submodel.is_universal)
        build = partial(_build, builder, own, submodel, texts, encoders, read, routes, capacity)
        part = CACHED if capacity is None else f"{CACHED}{capacity}"
        engines.append(_once(builder, submodel, part, own.bucket, build))
    return [*encoders, *engines]


def _texts(universal: UniversalModel, entry: GenerationEntry, submodel: Submodel, long: bool) -> list[Batch]:
    """Those of the gate; of a large model shorter ones, and of its narrower widths the ones in which runs of all kinds
    follow each other: drafts and steps, of rows that are in one cache."""
    if not universal.source.is_large:
        return cached_batches(entry, long)
    if replace(submodel, precision=None).has_all_widths:
        return cached_batches(entry, long, _FEW_TOKENS)
    return cached_batches(entry, long=False, tokens=_FEWEST_TOKENS)[1::2]


def _once(
    builder: EngineBuilder, submodel: Submodel, part: str, bucket: Bucket, build: Callable[[str, str], EngineEntry]
) -> EngineEntry:
    """The result of ``build`` for the name of an engine and its file, or made in an earlier run."""
    name, stem = builder.named(submodel, part, bucket)
    file = f"{stem}.onnx"
    return builder.stage.memo(stem, EngineEntry, lambda: build(name, file), [file])


def _build_encoder(
    builder: EngineBuilder, form: CachedSpec, submodel: Submodel, batches: Sequence[Batch], name: str, file: str
) -> EngineEntry:
    part, cases = builder.universal.source.parts[ENCODER], prompts_of(batches)
    engine = builder.emit(name, file, submodel, part.at(Bucket(1, 1)), ENCODER)
    engine = replace(engine, entry=_with_cache_layout(engine.entry, form, builder.universal.source.cached))
    found = builder.run(engine.entry, [case.feeds for case in cases])
    module = builder.references.of(submodel).viewed(part.module, part.outputs)
    limit = tolerance_of(engine.entry, builder.universal)
    expected = replayed(module, cases, engine.entry.routing, found, limit.atol)
    return builder.proven(engine, module, cases, expected, found, submodel)


def _build(
    builder: EngineBuilder,
    form: CachedSpec,
    submodel: Submodel,
    batches: Sequence[Batch],
    encoders: Sequence[EngineEntry],
    read: _Read,
    routes: PromptRoutes | None,
    capacity: int | None,
    name: str,
    file: str,
) -> EngineEntry:
    emitted = builder.emit(name, file, submodel, form.bucket, CACHED, capacity)
    held = _activation_bytes(builder, form, submodel, emitted.entry.precision)
    entry = _with_cache_layout(replace(emitted.entry, activation_bytes=held), form, builder.universal.source.cached)
    engine = replace(emitted, entry=entry)
    limit = tolerance_of(entry, builder.universal)
    answers = _answers(builder, form, entry, batches, read)
    rule = limit.rule
    if PRECISIONS[entry.precision].has_exact_form:
        _prove_exact(builder, form, engine, submodel, batches)
        rule = builder.prove_exact.stated(entry, rule)
    references = builder.engine_references.of(builder.proofs, entry, *encoders)
    verdict = judge_cached(references, form, entry, batches, answers, routes)
    run = ProofRun(engine.proof_graph, engine.template.module_outputs, builder.proofs.path)
    reference = partial(_reference, references, submodel, form)
    require_cached_parity(f"engine {name}", verdict, run, reference, form, batches, limit, read, routes, capacity)
    if references is not builder.references:
        written = cached_answers(builder.references, submodel, form, batches)
        verdict = distance(written, answers, cases_of(batches), JudgedOutputs(judged_specs(form.entry)))
    for note in (unproven_window(form.entry, batches), unjudged(cases_of(batches), judged_specs(form.entry))):
        rule = rule if note is None else f"{rule}; {note}"
    reference_of = f"narrowed to {submodel.id}, one pass, in float64"
    return builder.with_receipt(engine, reference_of, rule, cases_of(batches), verdict)


def _with_cache_layout(entry: EngineEntry, form: CachedSpec, whole: CachedSpec | None) -> EngineEntry:
    """``entry`` with what ``form`` keeps of a token: heads and their sizes, where they are not those of the ``whole``
    model."""
    kind = entry.kind
    assert whole is not None
    assert isinstance(kind, Decode | Encoder)
    if isinstance(kind, Decode):
        own, most = form.layers, whole.layers
        kind = replace(kind, cache_heads=_other(_HEADS, own, most), cache_sizes=_other(_SIZES, own, most))
    if form.encoder is not None:
        own, most = form.entry.source_layers, whole.entry.source_layers
        kind = replace(kind, source_heads=_other(_HEADS, own, most), source_sizes=_other(_SIZES, own, most))
    return replace(entry, kind=kind)


def _other(
    number: Callable[[CachedLayer], int], layers: Sequence[CachedLayer], whole: Sequence[CachedLayer]
) -> tuple[int, ...] | None:
    """The ``number`` of each of ``layers``, or None where those of ``whole`` are the same."""
    found, known = (tuple(map(number, each)) for each in (layers, whole))
    return None if found == known else found


def _activation_bytes(builder: EngineBuilder, form: CachedSpec, submodel: Submodel, precision: Precision) -> int:
    """Bytes of activations in the longest run. Attention is one operator and keeps its scores once, or the model's own
    and keeps those of every place. Logits are left out, the last product: a run computes few of them, into buffers of
    the caller's."""
    tokens = max(form.bucket.sequence, form.bucket.batch)
    longest = 1 if form.states else min(tokens, form.positions)
    shape = Bucket(-(-tokens // longest), longest)
    ops = builder.universal.source.workload(submodel, shape)
    products = [op for op in ops if op.kind == "gemm"][:-1]
    scores = max((op.activation_bytes for op in ops if op.kind == "batched_gemm"), default=0)
    if form.is_buffered:
        scores = scores * form.positions // shape.sequence
    return predict(products, builder.profile, precision).activation_bytes + scores


def _prove_exact(
    builder: EngineBuilder, form: CachedSpec, engine: Emitted, submodel: Submodel, batches: Sequence[Batch]
) -> None:
    """Proves an integer engine without the rounding of its activations; see ``ExactProof``. Before it PyTorch reads the
    prompts. Texts of a large model in many pieces are left to the engine itself: every run decodes all 4 bits here."""
    limit, references, source = builder.prove_exact.limit, builder.engine_references, builder.universal.source
    if (lowered := references.form(builder.proofs, engine.entry, submodel)) is not None:
        answers = in_torch(cached_reference(Reference(None, lowered, ()), form), cases_of(batches))
        written = cached_answers(builder.references, submodel, form, batches)
        require_form(engine.entry.id, judge_rows(written, form, batches, answers, limit), limit)
    entry, graph = builder.prove_exact.graph(engine)
    rounded = references.rounded(builder.proofs, engine.entry)
    read: _Read = None
    if form.encoder is not None:
        encoder = form.encoder.module(rounded.of(submodel).module)
        with torch.no_grad():
            read = {
                case.name: [tensor.numpy() for tensor in encoder(torch.from_numpy(prompt_in(case)[None]))]
                for case in prompts_of(batches)
            }
    expected = cached_answers(rounded, submodel, form, batches)  # of all, which the engine itself is held against too
    if source.is_large:
        batches = [b for b in batches if len(b) == 1 and len(b[0].pieces) <= _FEW_PIECES] or batches[-1:]
        expected = cached_answers(rounded, submodel, form, batches)
    verdict = judge_rows(expected, form, batches, _answers(builder, form, entry, batches, read), limit)
    subject = f"engine {entry.id}, without the rounding of activations"
    run = ProofRun(graph, engine.template.module_outputs, builder.proofs.path)
    reference = partial(_reference, rounded, submodel, form)
    require_cached_parity(subject, verdict, run, reference, form, batches, limit, read)


def _reference(references: References, submodel: Submodel, form: CachedSpec) -> Reference:
    return cached_reference(references.of(submodel), form)


def _answers(
    builder: EngineBuilder, form: CachedSpec, engine: EngineEntry, batches: Sequence[Batch], read: _Read
) -> list[Arrays]:
    with builder.runner(engine) as runner:
        return run_batches(runner, engine, form.entry, batches, read)


def verify_generating(bundle: Bundle, references: EngineReferences, engine: EngineEntry) -> Iterator[EngineVerdict]:
    """A written KV-cache engine and what reads its prompts; packed, where the gate of the build ran them
    shared."""
    for judged in judge_generating(bundle, references, engine):
        yield EngineVerdict.of(judged.engine, judged.verdict)


def judge_generating(
    bundle: Bundle, references: EngineReferences, engine: EngineEntry, task: TaskTensors | None = None
) -> Iterator[JudgedEngine]:
    """A KV-cache engine, and before it the one that reads its prompts, if there is one; with the tensors of
    ``task``, else the base's. ``references`` are those of the universal model with the same."""
    if bundle.merged is not None:
        task = None  # it is in the weights
    generation, universal = bundle.manifest.generation, references.of_model.universal
    whole, of_all = universal.source.cached, references.of_model.of_all
    assert generation is not None
    assert whole is not None
    submodel = universal.spec.parse(engine.submodel)
    entry, form = generation.of(engine), whole.at(submodel)
    if engine.capacity is not None:
        form = form.within(engine.capacity)
    batches = _texts(universal, form.entry, submodel, submodel.is_universal and of_all)
    if not of_all:  # rows, read at once and taken on together; drafts and longer runs were the gate's
        batches = [batches[-1][-1 if references.of_model.looks else 0 :]]
    encoder, read, routes = generation.encoder_of(engine), None, None
    if encoder is not None:
        with _opened(bundle, encoder, task, residency_of(references, encoder)) as runner:
            read, routes = read_prompts(runner, entry, batches), prompt_routes(runner, encoder, batches)
        verdict = _of_encoder(bundle, references.of(bundle, encoder), encoder, batches, read, routes)
        yield JudgedEngine(encoder, verdict, prompts_of(batches))
    with _opened(bundle, engine, task, residency_of(references, engine)) as runner:
        found = run_batches(runner, engine, entry, batches, read)
    own = references.of(bundle, engine, *([] if encoder is None else [encoder]))
    yield JudgedEngine(engine, judge_cached(own, form, engine, batches, found, routes), cases_of(batches))


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
def _opened(bundle: Bundle, engine: EngineEntry, task: TaskTensors | None, residency: Residency) -> Iterator[Runner]:
    with runner_for(bundle, engine, residency, threads_or_default(None)) as opened:
        if task is None:
            yield opened
        else:
            assert isinstance(opened, TakesTasks)
            yield opened.for_task(task)
