"""Origin of a compiled result: its source's files, the tools, the device and the job's options."""

import platform
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from uuid import uuid4

import onnxruntime

from ..bundle.files import FileIdentity
from ..bundle.manifest import FileEntry, JobOptions, Provenance
from ..exporters.checkpoints.checkpoint import sha256_of
from ..exporters.in_memory.checkpoint import ModuleInMemory
from ..exporters.source import ModelSource
from ..profiles.backends import BACKENDS, BackendName
from ..profiles.device_profile import DeviceProfile, profile_data
from ..strict import digest
from .job import Job

_VERSIONED_PACKAGES = ("nestforge", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "numpy")


@dataclass(frozen=True)
class JobKeys:
    """Keys by which the work of a job is found again, each a digest.

    ``resume``: of everything that an interrupted compile must share with the one that goes on. ``shared``: of what jobs
    share whose models are alike once they are ranked, whatever their devices and submodels are. ``sha256``: of
    everything that a bundle follows from; the manifest states the ``provenance``.
    """

    provenance: Provenance
    resume: str
    shared: str
    sha256: str


def keys_of(job: Job) -> JobKeys:
    """The keys of ``job``; those of a module in memory are new each time, since nothing says whether its code is the
    same."""
    stated = provenance_of(job.source, job.profile, job.options)
    resume = {
        "module": uuid4().hex if isinstance(job.source.checkpoint, ModuleInMemory) else None,
        "provenance": stated,
        "corpus": job.corpus.key if job.corpus is not None else None,
        "lora_rank": job.lora_rank,
        "tasks": {name: {path.name: sha256_of(path) for path in task.files} for name, task in job.tasks.items()},
    }
    shared = {**resume, "provenance": replace(stated, profile={}, options=job.shared_options)}
    return JobKeys(stated, *map(digest, (resume, shared, {**resume, "emit_only": job.emit_only})))


def provenance_of(source: ModelSource, profile: DeviceProfile, options: JobOptions) -> Provenance:
    """Origin of a bundle, as its manifest states it."""
    tools, files = tool_versions(profile.backend), source_entries(source)
    return Provenance(tools, files, profile_data(profile), options, source.checkpoint.hub)


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
