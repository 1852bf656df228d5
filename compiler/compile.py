"""The main job: one checkpoint in, one verified bundle out. Read ``compile_bundle`` from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..argument_types import takes_request
from ..bundle.entries.task_entry import BASE
from ..bundle.manifest import BUILD_NAME, MANIFEST_NAME
from ..bundle.open_bundle import Bundle, open_bundle
from ..errors import ParityError
from ..exporters.universal import load_universal
from ..profiles.backends import BACKENDS
from ..profiles.compile_request import CompileRequest
from ..profiles.precision import TRACED
from .add_task import add_tasks, tasks_entry
from .engines.build_engine import EngineBuilder, MergingBuilder
from .engines.engine_references import EngineReferences
from .engines.fp32_reference import Fp32Reference, build_fp32_reference, calibrated
from .engines.kinds import build_engines, shapes_of, verify_engines
from .engines.measure import fit_rungs, measure_engines, measure_quality
from .engines.templates import Templates
from .examples.rank_axes import rank_axes
from .graph.precision.proof_graphs import proof_bundle_in, with_proof_graphs
from .graph.store import read_store, share_store, write_store
from .job import Job, resolve
from .parity.cases import few
from .parity.prove import prove, prove_texts
from .parity.references import References, references_at, smallest
from .provenance import JobKeys, keys_of
from .tensorrt.build_bundle import build_plans
from .work.clock import Clock
from .work.staging import Stage, publish, staged
from .write_bundle import (
    complete,
    partial_bundle,
    with_weights,
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
    clock = Clock(request.progress)
    return compile_job(prepare(request, clock), clock)


def prepare(request: CompileRequest, clock: Clock) -> Job:
    """The job of a request that can be compiled here. Raises a NestforgeError."""
    with clock.unreported("plan"):  # what would fail later fails here
        job = resolve(request)
        job.validate()
    return job


def compile_job(job: Job, clock: Clock, begin: Callable[[], None] = lambda: None, pools: Path | None = None) -> Path:
    """``compile_bundle`` of what was prepared; calls ``begin`` once its output is known to be free. Jobs of one model
    that are given the same folder ``pools`` trace it once, and their bundles share the file of the weights."""
    keys, replaced = keys_of(job), (MANIFEST_NAME, BUILD_NAME) if job.overwrite else ()
    pool = None if pools is None else pools / keys.shared
    with staged(job.output, keys.resume, replaced, pool) as stage:
        if not stage.is_published:  # by an earlier call that was stopped after that
            begin()
            _compile(job, keys, stage, clock)
            publish(stage, job.output)
        if not BACKENDS[job.profile.backend].runs_graphs and not job.emit_only:
            build_plans(job.output, clock.progress)  # the stage is kept until they are built
    return job.output


def _compile(job: Job, keys: JobKeys, stage: Stage, clock: Clock) -> None:
    """Fills the stage's folder, step by step; each finds what an earlier run of it finished."""
    with clock("load"):
        universal = load_universal(job.source)
        base_sha256 = universal.frozen_sha256() if job.source.tasks is not None else ""
        for task in job.tasks.values():  # before the work, not behind it
            task.require_base(base_sha256)
    with clock("rank"):  # every elastic dimension becomes a prefix
        # A published slice is a prefix of the order that the model's folder has.
        ranking = rank_axes(universal, job.corpus, stage, clock, keeps_order=bool(job.options.slices))
    bundle = partial_bundle(stage, universal.source, ranking, keys.provenance)
    shapes = {shape for one in (universal.spec.universal(), *job.candidates) for shape in shapes_of(one, job.profile)}
    references = references_at(universal, shapes, BACKENDS[job.profile.backend].runs_graphs)
    templates, weights, fp32 = _templates(job, references, stage, bundle, clock)
    store = read_store(weights, universal.spec)
    tasks = tasks_entry(universal, store, base_sha256)  # whose tensors engines take as inputs
    builder = EngineBuilder(
        references=references,
        profile=job.profile,
        templates=templates,
        store=store,
        stage=stage,
        bundle=with_weights(bundle, weights, tasks),
    )
    with clock("measure"):  # a few rungs on this host correct the predictions
        corrections = fit_rungs(builder, job.rungs, job.included, clock)
    # Graphs say in which encodings engines read each weight, so that budgets are judged by what is built.
    plan = job.plan(replace(universal.source, encodings=templates.encodings), corrections)
    chosen = job.chosen(universal.spec, plan)
    engines = build_engines(builder, chosen, clock)  # slice, and compare with PyTorch: the gate
    merging = MergingBuilder.beside(builder)
    merged = build_engines(merging, chosen, clock, "merged") if job.options.mergeable else ()
    with clock("quality"):  # what the submodels keep, on held-out texts or rows
        quality = measure_quality(builder, engines, job.corpus, clock, fp32)
    with clock("bench"):  # what the dispatcher will go by
        latencies = measure_engines(builder, engines, corrections, clock)
        latencies += measure_engines(merging, merged, corrections, clock) if merged else ()
    completed = complete(builder.bundle, plan, chosen, engines, quality, latencies, merged)
    with clock("prove"):  # slices, exits and thresholds: what no engine shows alone
        proven = with_proof_graphs(completed, builder.proofs.path)
        proofs = prove(proven, chosen, builder.references, clock)
        texts = prove_texts(proven, universal)
    manifest = write_manifest(stage, completed, proofs, texts)
    with clock("hash"):
        written = written_bundle(stage, completed.build)
    with clock("verify"):  # the written files, through the runtime
        _verify_written(stage, written, builder.engine_references, clock)
    write_build_record(stage, manifest, job.command, clock, latencies, keys.sha256)
    if job.tasks:
        with clock("tasks"):  # each proven on the written files, as one that is added later
            add_tasks(open_bundle(stage.folder), universal, builder.cases, job.tasks, clock)


def _templates(
    job: Job, references: References, stage: Stage, bundle: Bundle, clock: Clock
) -> tuple[Templates, tuple[Path, ...], Fp32Reference | None]:
    """The templates of every candidate in each of its precisions; the files of the store, with every weight that they
    read; and where precisions are others than the traced one, the float32 engine that they were calibrated on."""
    universal = references.universal
    templates, fp32 = Templates(universal, stage, job.profile), None
    keys = templates.keys(job.candidates, job.profile.buckets)
    with clock("trace"):  # once per bucket, depth and segment
        for key in clock.each(list(dict.fromkeys(key.traced for key in keys))):
            templates.get(key)
    if job.profile.precisions != (TRACED,):
        with clock("reference"):  # the model in fp32
            fp32 = build_fp32_reference(templates, stage, bundle)
        with clock("calibrate"):  # what other precisions must know of the values that they hold
            templates = calibrated(templates, stage, fp32, references.cases[fp32.engine.bucket], job.corpus, clock)
    with clock("store"):  # every weight once in each precision, elastic dimension first
        for key in keys:
            templates.get(key)
        once = partial(stage.once, follows_from=templates.stored_for())
        names, tables = templates.weights(), templates.tables()
        files = write_store(universal, names, tables, stage.folder, templates.rounded, once)
        if fp32 is None:  # whose store the model shares, since this one has lower precisions
            share_store(universal, files)
    return templates, files, fp32


def _verify_written(stage: Stage, written: Bundle, references: EngineReferences, clock: Clock) -> None:
    """These very files were proven on every case, in another residency: a few show that the runtime finds them and
    answers as packed as users have it; of a large model one does, without a copy of its weights."""
    here = proof_bundle_in(written, stage.work / "verify")
    merged = here.manifest.tasks is not None and here.manifest.tasks.merged
    some = smallest if references.of_model.looks else few
    for bundle in (here, here.with_merged(BASE)) if merged else (here,):
        for verdict in verify_engines(bundle, references.on(some), clock):
            if verdict.problem:
                raise ParityError(f"engine {verdict.engine}, as written: {verdict.problem}")
