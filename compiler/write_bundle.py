"""The manifest, the build record and its rendering, as docs/bundle-format.md specifies them."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime, timezone
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import uuid4

import onnxruntime

from ..bundle.build_record import BuildRecord, Latency
from ..bundle.device_files.task_index import TASK_FILE_PREFIX
from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.entries.generation_entry import GenerationEntry
from ..bundle.entries.task_entry import TasksEntry
from ..bundle.figures import meanings, present
from ..bundle.files import FileIdentity, sealed_json, to_json
from ..bundle.manifest import (
    BUILD_NAME,
    MANIFEST_NAME,
    REPORT_NAME,
    SCHEMA_VERSION,
    TASKS_NAME,
    UNLISTED,
    BudgetEntry,
    FileEntry,
    JobOptions,
    Manifest,
    Proof,
    Provenance,
    Quality,
    Ranking,
    SubmodelEntry,
    TextReceipt,
)
from ..bundle.open_bundle import Bundle
from ..bundle.read_manifest import read_manifest
from ..elastic import Submodel
from ..exporters.checkpoints.checkpoint import sha256_of
from ..exporters.checkpoints.generation_defaults import read_chat_template
from ..exporters.in_memory.checkpoint import ModuleInMemory
from ..exporters.source import ModelSource
from ..profiles.backends import BACKENDS, BackendName
from ..profiles.device_profile import DeviceProfile, profile_data
from ..profiles.probe_host import probe_host
from ..runtime.generation.sampling import Sampling
from ..runtime.summary import (
    ShortNames,
    Table,
    bundle_facts,
    common_details,
    detail_tables,
    engine_table,
    stage_table,
    submodel_table,
)
from ..strict import unstructure
from .job import Job
from .planning.plan import Plan
from .work.clock import Clock
from .work.staging import Stage, digest, write_synced

_VERSIONED_PACKAGES = ("nestforge", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "numpy")
_TEMPLATE_NAME = "chat_template.jinja"


def tool_versions(backend: BackendName = "onnxruntime") -> dict[str, str]:
    """Versions of everything that shapes a bundle's bytes, and of the back end that proves its engines."""
    # Several distributions bring ONNX Runtime, so the module is asked.
    own = {"python": platform.python_version(), "onnxruntime": onnxruntime.__version__}
    entry = BACKENDS[backend]
    if entry.runs_graphs and backend not in own:
        own[backend] = metadata.version(entry.distributions[0])
    return {**own, **{name: metadata.version(name) for name in _VERSIONED_PACKAGES}}


def source_entries(source: ModelSource) -> tuple[FileEntry, ...]:
    """The checkpoint's files, by path inside its folder; of a module in memory its weights."""
    if isinstance(source.checkpoint, ModuleInMemory):
        return (source.checkpoint.entry,)
    folder = source.checkpoint.folder
    return tuple(_entry(folder, path, FileIdentity.of(path.stat())) for path in source.source_files())


@lru_cache(maxsize=1024)
def _entry(folder: Path, path: Path, _identity: FileIdentity) -> FileEntry:
    """That of a file in a state, which is read once."""
    return FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, sha256_of(path))


def resume_key(job: Job) -> dict[str, Any]:
    """Everything that an interrupted compile must share with the one that goes on, which that of a module in memory
    never does: nothing says whether its code is the same."""
    return {
        "module": uuid4().hex if isinstance(job.source.checkpoint, ModuleInMemory) else None,
        "tools": tool_versions(job.profile.backend),
        "source": source_entries(job.source),
        "profile": job.profile,
        "corpus": job.corpus.key if job.corpus is not None else None,
        "options": job.options,
        "lora_rank": job.lora_rank,
        "tasks": {name: {path.name: sha256_of(path) for path in task.files} for name, task in job.tasks.items()},
    }


def shared_key(job: Job) -> dict[str, Any]:
    """What jobs share whose models are alike once they are ranked, whatever their devices and submodels are."""
    return {**resume_key(job), "profile": None, "options": job.shared_options}


def job_sha256(job: Job) -> str:
    """The digest of everything that a bundle of ``job`` follows from."""
    return digest({**resume_key(job), "emit_only": job.emit_only})


def partial_bundle(
    stage: Stage, source: ModelSource, ranking: Ranking, profile: DeviceProfile, options: JobOptions
) -> Bundle:
    """The bundle in the staging folder before it has engines: what runners need to open one."""
    signature = source.signature
    if signature.text is not None and source.tokenizer is not None:
        stage.once(stage.folder / signature.text.file, partial(write_synced, data=source.tokenizer))
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        name=source.name,
        family=source.family.name,
        axes=source.spec.axes,
        trained_nested=source.spec.trained_nested,
        ranking=ranking,
        submodels=(),
        engines=(),
        budgets=(),
        inputs=signature.inputs,
        outputs=signature.outputs,
        files=(),
        provenance=Provenance(
            tool_versions(profile.backend),
            source_entries(source),
            profile_data(profile),
            options,
            source.checkpoint.hub,
        ),
        text=signature.text,
        exits=source.exits.entry if source.exits else None,
        generation=generation_entry(source, stage),
    )
    return Bundle(stage.folder.absolute(), manifest, BuildRecord(SCHEMA_VERSION, "", "", (), {}, {}, {}, ()))


def with_weights(bundle: Bundle, files: Iterable[Path]) -> Bundle:
    """The partial bundle with the files of its weight store, of which receipts will be."""
    entries = tuple(FileEntry(path.name, path.stat().st_size, sha256_of(path)) for path in files)
    return replace(bundle, manifest=replace(bundle.manifest, files=entries))


def with_task_inputs(bundle: Bundle, tasks: TasksEntry | None) -> Bundle:
    """The partial bundle whose engines take the tensors of ``tasks`` as inputs, if there are any."""
    return replace(bundle, manifest=replace(bundle.manifest, tasks=tasks))


def complete(
    bundle: Bundle,
    plan: Plan,
    chosen: Sequence[Submodel],
    engines: Sequence[EngineEntry],
    quality: Mapping[str, Quality],
    latencies: Sequence[Latency],
    merged: Sequence[EngineEntry] = (),
) -> Bundle:
    """The partial ``bundle`` with its submodels, engines of every kind, those that tasks are ``merged`` into, and
    budgets: everything but the files, so that it can answer."""
    candidates = {candidate.id: candidate for candidate in plan.candidates}
    submodels = tuple(
        SubmodelEntry(c.id, c.labels, c.values, c.parameters, c.weight_bytes, quality.get(c.id), c.precision, c.states)
        for c in (candidates[submodel.id] for submodel in chosen)
    )
    tasks = bundle.manifest.tasks
    manifest = replace(
        bundle.manifest.with_engines(engines),
        tasks=None if tasks is None else replace(tasks, merged=tuple(merged)),
        submodels=submodels,
        budgets=tuple(BudgetEntry(b.name, b.limits, b.submodel, b.reason) for b in plan.budgets),
        notes=plan.notes,
    )
    return replace(bundle, manifest=manifest, build=replace(bundle.build, latencies=tuple(latencies)))


def write_manifest(
    stage: Stage, completed: Bundle, proofs: Sequence[Proof], texts: Sequence[TextReceipt] = ()
) -> Manifest:
    """Writes the manifest of a completed bundle; files of engines that it does not list are removed first.

    It states of graphs and weights the hashes in the receipts: what is read again must be what the gate has proven.
    """
    engines = completed.manifest.listed_engines
    proven = {entry.path: entry.sha256 for entry in completed.manifest.files}
    for engine in engines:
        if engine.parity is not None:
            proven[engine.file] = engine.parity.graph_sha256
    listed = {engine.file for engine in engines}
    for path in (*stage.folder.glob(f"{TASK_FILE_PREFIX}*"), stage.folder / TASKS_NAME):
        path.unlink(missing_ok=True)  # of an earlier run: tasks are added to the bundle that this manifest is of
    for path in stage.folder.glob("*.onnx"):
        if path.name not in listed:  # rungs that were built only to be measured
            path.unlink()
    paths = sorted(path for path in stage.folder.iterdir() if path.is_file() and _listed(path.name))
    manifest = replace(
        completed.manifest,
        files=tuple(FileEntry(p.name, p.stat().st_size, proven.get(p.name) or sha256_of(p)) for p in paths),
        proofs=tuple(proofs),
        texts=tuple(texts),
    )
    write_synced(stage.folder / MANIFEST_NAME, to_json(unstructure(manifest)))
    return manifest


def written_bundle(stage: Stage, build: BuildRecord) -> Bundle:
    """The bundle as its files state it, every byte of them checked; ``build`` is what will be recorded beside them.

    Raises BundleFormatError or BundleCorruptError.
    """
    path = stage.folder / MANIFEST_NAME
    bundle = Bundle(stage.folder.absolute(), read_manifest(path.read_bytes(), str(path)), build)
    bundle.require_hashes(*(entry.path for entry in bundle.manifest.files))
    return bundle


def write_build_record(
    stage: Stage,
    manifest: Manifest,
    command: Sequence[str],
    clock: Clock,
    latencies: Sequence[Latency],
    job_sha256: str | None = None,
) -> None:
    """Writes what differs between two compiles of the same inputs: the build record and its rendering."""
    record = BuildRecord(
        schema_version=SCHEMA_VERSION,
        manifest_sha256=hashlib.sha256((stage.folder / MANIFEST_NAME).read_bytes()).hexdigest(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=tuple(command),
        host=asdict(probe_host()),
        seconds=dict(clock.seconds),
        cpu_seconds=dict(clock.cpu_seconds),
        latencies=tuple(latencies),
        job_sha256=job_sha256,
    )
    report = render_report(manifest, record).encode()
    write_synced(stage.folder / REPORT_NAME, report)
    sealed = replace(record, report_sha256=hashlib.sha256(report).hexdigest())
    write_synced(stage.folder / BUILD_NAME, sealed_json(unstructure(sealed)))


def _listed(name: str) -> bool:
    return name not in UNLISTED and not name.startswith(".")


def generation_entry(source: ModelSource, stage: Stage) -> GenerationEntry | None:
    """The interface of ``source``'s KV-cache engines, its tokens that end a text, and how its folder samples;
    its chat template is written into the bundle. None for a model that is not to generate. Raises CheckpointError."""
    if source.cached is None:
        return None
    entry, template = stated_entry(source)
    if template is not None:
        write = partial(write_synced, data=template.encode())
        stage.once(stage.folder / _TEMPLATE_NAME, write)
    return entry


def stated_entry(source: ModelSource) -> tuple[GenerationEntry, str | None]:
    """The entry of ``generation_entry`` for a model that is to generate, and its chat template."""
    stated = source.generation_defaults
    assert source.cached is not None
    assert stated is not None
    template = read_chat_template(source.checkpoint.folder)
    entry = replace(
        source.cached.entry,
        end_ids=stated.end_ids,
        begin_id=stated.begin_id,
        sampling=_options(stated.sampling) or None,
    )
    if template is None:
        return entry, None
    return replace(entry, chat_template=_TEMPLATE_NAME, special_tokens=template.special_tokens), template.source


def _options(sampling: Sampling) -> dict[str, int | float]:
    """The options that are not the defaults."""
    usual = Sampling()
    found = {option.name: getattr(sampling, option.name) for option in fields(Sampling)}
    return {name: value for name, value in found.items() if value != getattr(usual, name)}


def render_report(manifest: Manifest, build: BuildRecord) -> str:
    """Markdown: facts, submodels with their quality, engines with their parity, and the seconds of each stage."""
    sections = [
        f"# {manifest.name}",
        markdown(Table(["", ""], [*bundle_facts(manifest, build), *common_details(manifest).items()])),
        "## Submodels",
        _quality_note(manifest),
        markdown(submodel_table(manifest, build)),
        markdown(ShortNames.of(manifest).ids),
        "## Engines",
        markdown(engine_table(manifest, build)),
        *(f"## {heading}\n\n{markdown(table)}" for heading, table in detail_tables(manifest).items()),
        "## Compile",
        markdown(stage_table(build)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _quality_note(manifest: Manifest) -> str:
    measured = [entry.quality for entry in manifest.submodels if entry.quality]
    if not measured:
        return "Quality was not measured: the compile was given no data to compare outputs on."
    first = measured[0]
    positions = f" with {first.positions} positions" if first.positions is not None else ""
    held_out = f"{first.samples} samples{positions} that took no part in the ranking"
    head = f"Each submodel against the universal model on {held_out}; ± is the standard error of so few:"
    return "\n".join([head, "", *(f"- {line}" for line in meanings(present([first.figures])))])


def markdown(table: Table) -> str:
    """A table as Markdown."""
    rows: list[Sequence[str]] = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
