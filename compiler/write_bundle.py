"""The manifest, the build record and its rendering, as docs/bundle-format.md specifies them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ..bundle.build_record import BuildRecord, Latency
from ..bundle.device_files.task_index import TASK_FILE_PREFIX
from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.entries.generation_entry import GenerationEntry
from ..bundle.entries.task_entry import TasksEntry
from ..bundle.figures import meanings, present
from ..bundle.files import sealed_json, to_json
from ..bundle.manifest import (
    BUILD_NAME,
    MANIFEST_NAME,
    REPORT_NAME,
    SCHEMA_VERSION,
    TASKS_NAME,
    UNLISTED,
    BudgetEntry,
    FileEntry,
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
from ..exporters.source import ModelSource
from ..profiles.probe_host import probe_host
from ..runtime.generation.sampling import Sampling
from ..runtime.summary import (
    ShortNames,
    bundle_facts,
    common_details,
    detail_tables,
    engine_table,
    stage_table,
    submodel_table,
)
from ..strict import unstructure
from ..tables import Table
from .planning.plan import Plan
from .work.clock import Clock
from .work.staging import Stage, write_synced

_TEMPLATE_NAME = "chat_template.jinja"


def partial_bundle(stage: Stage, source: ModelSource, ranking: Ranking, provenance: Provenance) -> Bundle:
    """The bundle in the staging folder before it has engines: what runners need to open one. Raises CheckpointError."""
    signature, (generation, template) = source.signature, stated_entry(source)
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
        provenance=provenance,
        text=signature.text,
        exits=source.exits.entry if source.exits else None,
        generation=generation,
    )
    texts = {} if template is None else {_TEMPLATE_NAME: template.encode()}
    file = source.writing_tokenizer if signature.text is None else signature.text.file
    if file is not None and source.tokenizer is not None:
        texts[file] = source.tokenizer
    for name, data in texts.items():
        stage.once(stage.folder / name, partial(write_synced, data=data))
    return Bundle(stage.folder.absolute(), manifest, BuildRecord(SCHEMA_VERSION, "", "", (), {}, {}, {}, ()))


def with_weights(bundle: Bundle, files: Iterable[Path], tasks: TasksEntry | None = None) -> Bundle:
    """The partial bundle with the files of its weight store, of which receipts will be, and the ``tasks`` whose tensors
    its engines take as inputs, if there are any."""
    entries = tuple(FileEntry(path.name, path.stat().st_size, sha256_of(path)) for path in files)
    return replace(bundle, manifest=replace(bundle.manifest, files=entries, tasks=tasks))


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


def stated_entry(source: ModelSource) -> tuple[GenerationEntry | None, str | None]:
    """The interface of ``source``'s KV-cache engines, its tokens that end a text, and how its folder samples; and its
    chat template. None for a model that is not to generate. Raises CheckpointError."""
    stated = source.generation_defaults
    if source.cached is None or stated is None:
        return None, None
    template = stated.template
    entry, forced = source.cached.entry, stated.forced
    if (encoder := entry.encoder) is not None:
        encoder = replace(encoder, first_id=forced.get("first_id"), last_id=forced.get("last_id"))
    entry = replace(
        entry,
        encoder=encoder,
        end_ids=stated.end_ids,
        begin_id=stated.begin_id,
        sampling=_options(stated.sampling) or None,
        suppressed_ids=stated.suppressed or None,
        suppressed_first_ids=stated.suppressed_first or None,
        tokenizer=source.writing_tokenizer,
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
        Table.facts([*bundle_facts(manifest, build), *common_details(manifest).items()]).markdown(),
        "## Submodels",
        _quality_note(manifest),
        submodel_table(manifest, build).markdown(),
        ShortNames.of(manifest).ids.markdown(),
        "## Engines",
        engine_table(manifest, build).markdown(),
        *(f"## {heading}\n\n{table.markdown()}" for heading, table in detail_tables(manifest).items()),
        "## Compile",
        stage_table(build).markdown(),
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
