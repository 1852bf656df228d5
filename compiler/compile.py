"""The main job: one checkpoint in, one verified bundle out. Read ``compile_bundle`` from top to bottom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from ..bucket import Bucket
from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.entries.task_entry import BASE
from ..bundle.manifest import BUILD_NAME, MANIFEST_NAME, WEIGHTS_NAME
from ..bundle.open_bundle import Bundle, open_bundle
from ..elastic import Submodel
from ..errors import BuildError, InputError, ParityError
from ..exporters.checkpoints.checkpoint import sha256_of
from ..exporters.source import ModelSource
from ..exporters.universal import UniversalModel, load_universal
from ..profiles.backends import BACKENDS
from ..profiles.compile_request import CompileRequest, takes_request
from ..profiles.device_profile import DeviceProfile, profile_data
from ..profiles.precision import TRACED
from ..profiles.probe_host import is_this_host
from ..runtime.engines.runner import opener
from ..strict import unstructure
from .add_task import add_tasks, frozen_sha256, require_base, require_names, tasks_entry
from .engines.build_engine import EngineBuilder
from .engines.cached import build_cached
from .engines.fp32_reference import build_fp32_reference, calibrated, require_examples
from .engines.measure import fit_rungs, measure_engines, measure_quality
from .engines.merging import MergingBuilder
from .engines.segments import build_segments
from .engines.templates import Templates
from .examples.corpus import ArrayCorpus, Corpus, read_array_corpus, read_corpus
from .examples.rank_axes import rank_axes, text_encoder
from .graph.precision.proof_graphs import proof_bundle_in, with_proof_graphs
from .graph.store import Store, read_store, write_store
from .parity.cases import few, parity_cases
from .parity.prove import prove
from .parity.references import References
from .planning.levels import in_every_precision
from .planning.plan import Plan
from .request import Resolved, resolve
from .tensorrt.build_bundle import build_plans
from .verify import verify_engines
from .work.clock import Clock
from .work.staging import Stage, publish, staged
from .write_bundle import (
    complete,
    draft_bundle,
    source_entries,
    tool_versions,
    with_task_inputs,
    write_build_record,
    write_manifest,
    written_bundle,
)


@takes_request(CompileRequest)
def compile_bundle(request: CompileRequest) -> Path:
    """Compiles the checkpoint of a request into a bundle, whose path it returns.

    The arguments are the fields of ``CompileRequest``. Plans for TensorRT are built here, unless ``emit_only`` leaves
    them to `nestforge build` on the device. Raises a NestforgeError and publishes nothing if an input is bad or a gate
    fails; an interrupted compile goes on where it was when called again with the same arguments.
    """
    clock, output, overwrite = Clock(request.progress), Path(request.output), request.overwrite
    with clock.unreported("plan"):  # what would fail later fails here
        require_names(None, list(request.tasks))
        resolved = resolve(request)
        source, device = resolved.source, resolved.profile
        source.checkpoint.require_weights()
        _require_backend(resolved)
        _refuse_impossible_budgets(resolved)
        corpus = _corpus(source, request)
        require_examples(device.precisions, corpus)
    with staged(output, _key(resolved, corpus), (MANIFEST_NAME, BUILD_NAME) if overwrite else ()) as stage:
        if stage.is_published:  # an earlier call was stopped after that
            return _with_plans(output, resolved)
        with clock("load"):
            universal = load_universal(source)
            base_sha256 = frozen_sha256(universal) if source.tasks is not None else ""
            for task in resolved.tasks.values():  # before the work, not behind it
                require_base(task, base_sha256)
        with clock("rank"):  # every elastic dimension becomes a prefix
            ranking = rank_axes(universal, corpus, stage, clock)
        templates = Templates(universal, stage, device)
        keys = templates.keys([*in_every_precision(resolved.rungs), *resolved.submodels], device.buckets)
        with clock("trace"):  # once per bucket, depth and segment
            for key in clock.each(list(dict.fromkeys(key.traced for key in keys))):
                templates.get(key)
        draft, fp32 = draft_bundle(stage, universal.source, ranking, device, resolved.options), None
        if device.precisions != (TRACED,):
            with clock("calibrate"):  # what other precisions must know of the values that they hold
                fp32 = build_fp32_reference(templates, stage, draft)
                templates = calibrated(templates, stage, fp32, text_encoder(universal), corpus, clock)
        with clock("store"):  # every weight once in each precision, elastic dimension first
            for key in keys:
                templates.get(key)
            write = partial(write_store, universal, templates.weights(), templates.tables())
            stage.once(stage.folder / WEIGHTS_NAME, write)
        store = read_store(stage.folder / WEIGHTS_NAME, universal.spec)
        draft = with_task_inputs(draft, tasks_entry(universal, store, base_sha256))
        builder = _builder(universal, device, templates, stage, draft, store, [*resolved.rungs, *resolved.submodels])
        with clock("measure"):  # a few rungs on this host correct the predictions
            corrections = fit_rungs(builder, resolved.rungs, _asked(universal, resolved), clock)
        # Graphs say in which encodings engines read each weight, so that budgets are judged by what is built.
        plan = resolved.plan(replace(universal.source, encodings=templates.encodings), corrections)
        chosen = _chosen(universal, plan, resolved)
        with clock("build"):  # slice, and compare with PyTorch: the gate
            engines: list[EngineEntry] = []
            pairs = [(submodel, shape) for submodel in chosen for shape in _shapes(submodel, device)]
            for submodel, bucket in clock.each(pairs):
                engines += [builder.build(submodel, bucket), *build_segments(builder, submodel, bucket)]
        cached: tuple[EngineEntry, ...] = ()
        if request.generate:
            with clock("generate"):  # engines that keep a cache, the same gate
                cached = build_cached(builder, chosen, clock)
        merged: tuple[EngineEntry, ...] = ()
        if request.mergeable:
            with clock("merged"):  # engines that a task is merged into when they are opened, the same gate
                merging = MergingBuilder.beside(builder)
                merged = tuple(merging.build(submodel, bucket) for submodel, bucket in clock.each(pairs))
                if request.generate:
                    merged += build_cached(merging, chosen, clock)
        with clock("quality"):  # what the submodels keep, on held-out texts or rows
            quality = measure_quality(builder, text_encoder(universal), engines, corpus, clock, fp32)
        with clock("bench"):  # what the dispatcher will go by
            latencies = measure_engines(builder, engines, corrections, clock)
            if merged:
                whole = [engine for engine in merged if engine.segment is None]
                latencies += measure_engines(merging, whole, corrections, clock)
        completed = complete(draft, plan, chosen, engines, quality, latencies, cached, merged)
        with clock("prove"):  # slices, exits and thresholds: what no engine shows alone
            proven = with_proof_graphs(completed, builder.proofs.path)
            proofs = prove(proven, chosen, builder.references, clock)
        manifest = write_manifest(stage, completed, proofs)
        with clock("verify"):  # the written files, through the runtime
            _verify_written(stage, written_bundle(stage, completed.build), builder.references, clock)
        write_build_record(stage, manifest, request.command, clock, latencies)
        if resolved.tasks:
            with clock("tasks"):  # each proven on the written files, as one that is added later
                add_tasks(open_bundle(stage.folder), universal, builder.cases, resolved.tasks, clock)
        publish(stage, output)
        return _with_plans(output, resolved)


def _with_plans(output: Path, resolved: Resolved) -> Path:
    """The published bundle, with plans where they are to be built here; the stage is kept until they are."""
    if not BACKENDS[resolved.profile.backend].runs_graphs and not resolved.request.emit_only:
        build_plans(output, resolved.request.progress)
    return output


def _require_backend(resolved: Resolved) -> None:
    """Before any work: whether engines can be finished here, or need not be."""
    device, emit_only = resolved.profile, resolved.request.emit_only
    backend = BACKENDS[device.backend]
    if backend.runs_graphs:
        if emit_only:
            raise BuildError(
                f"`emit_only`: profile {device.name} is for {device.backend}, which runs graphs as they are; leave it "
                "out"
            )
        if problem := opener(backend.name).problem(device.precisions):
            raise BuildError(f"profile {device.name}: engines for {backend.title} cannot be proven here: {problem}")
    elif not emit_only and (problem := opener(backend.name).problem()):
        raise BuildError(
            f"profile {device.name}: plans for {backend.title} cannot be built here: {problem}; or compile with "
            "`emit_only=True` and run `nestforge build` on the device"
        )


def _refuse_impossible_budgets(resolved: Resolved) -> None:
    """Before any work. What is not known yet is judged later: a latency on this host once rungs were measured, memory
    in other precisions than the traced one once graphs say which weights stay in it."""
    device, budgets, memory_mb = resolved.profile, resolved.profile.budgets, resolved.profile.memory_mb
    if is_this_host(device):
        budgets = {name: replace(budget, latency_ms=None) for name, budget in budgets.items()}
    if device.precisions != (TRACED,):
        budgets, memory_mb = {name: replace(budget, memory_mb=None) for name, budget in budgets.items()}, inf
    replace(resolved, profile=replace(device, budgets=budgets, memory_mb=memory_mb)).plan()


def _corpus(source: ModelSource, request: CompileRequest) -> Corpus | ArrayCorpus | None:
    if request.text is not None and request.data is not None:
        raise InputError("text and data: expected one of them, the examples that rank the axes and show quality")
    if request.data is not None:
        return read_array_corpus(Path(request.data), source)
    return read_corpus(Path(request.text)) if request.text is not None else None


def _key(resolved: Resolved, corpus: Corpus | ArrayCorpus | None) -> dict[str, Any]:
    """Everything that an interrupted compile must share with the one that goes on."""
    return {
        "tools": tool_versions(),
        "source": unstructure(source_entries(resolved.source)),
        "profile": profile_data(resolved.profile),
        "corpus": corpus.key if corpus is not None else None,
        "options": resolved.options,
        "lora_rank": resolved.request.lora_rank,
        "tasks": {name: {path.name: sha256_of(path) for path in task.files} for name, task in resolved.tasks.items()},
    }


def _builder(
    universal: UniversalModel,
    device: DeviceProfile,
    templates: Templates,
    stage: Stage,
    draft: Bundle,
    store: Store,
    submodels: Iterable[Submodel],
) -> EngineBuilder:
    weights = stage.folder / WEIGHTS_NAME
    encoder = text_encoder(universal)
    shapes = {shape for submodel in (universal.spec.universal(), *submodels) for shape in _shapes(submodel, device)}
    cases = {shape: parity_cases(universal.source.signature, shape, encoder) for shape in sorted(shapes)}
    return EngineBuilder(
        references=References(universal, cases),
        profile=device,
        templates=templates,
        store=store,
        weights_sha256=sha256_of(weights),
        stage=stage,
        draft=draft,
    )


def _shapes(submodel: Submodel, device: DeviceProfile) -> list[Bucket]:
    """The buckets of the profile as ``submodel`` has them; several may be one."""
    return list(dict.fromkeys(map(submodel.at, device.buckets)))


def _asked(universal: UniversalModel, resolved: Resolved) -> set[str]:
    """Ids of the submodels that are built whatever budgets choose; the universal model, which the rest is held against,
    is always one."""
    every = [universal.spec.universal(), *resolved.submodels]
    if resolved.request.include == "levels":
        every += in_every_precision([level.submodel for level in resolved.levels])
    if resolved.request.include == "ladder":
        every += in_every_precision(resolved.rungs)
    return {submodel.id for submodel in every}


def _chosen(universal: UniversalModel, plan: Plan, resolved: Resolved) -> list[Submodel]:
    """The submodels to build, smallest first."""
    ids = {budget.submodel for budget in plan.budgets} | _asked(universal, resolved)
    found = [(c.parameters, universal.spec.parse(c.id)) for c in plan.candidates if c.id in ids]
    found.sort(key=lambda pair: (pair[0], [v for _, v in pair[1].structure], pair[1].bits or 0, pair[1].id))
    return [submodel for _, submodel in found]


def _verify_written(stage: Stage, written: Bundle, references: References, clock: Clock) -> None:
    """These very files were proven on every case, in another residency: a few show that the runtime finds them and
    answers as packed as users have it."""
    here = proof_bundle_in(written, stage.work / "verify")
    merged = here.manifest.tasks is not None and here.manifest.tasks.merged
    for bundle in (here, here.with_merged(BASE)) if merged else (here,):
        for verdict in verify_engines(bundle, references.on(few), clock):
            if verdict.problem:
                raise ParityError(f"engine {verdict.engine}, as written: {verdict.problem}")
