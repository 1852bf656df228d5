"""A bundle opened as a model, in what memory, on what processor and threads; or checked byte by byte."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

from ..argument_types import again, option, stated
from ..bundle.device_files.measurements import Measurements
from ..bundle.device_files.plan_index import read_plan, read_plans
from ..bundle.device_files.task_index import read_tasks
from ..bundle.open_bundle import Bundle, Check, open_bundle
from ..errors import InputError
from .device.threads import threads_and_affinity
from .engines.memory import MemoryCap, residencies_for
from .engines.onnxruntime_gpu.provider import PROVIDERS, provider_named
from .engines.residency import RESIDENCIES, Residency
from .engines.runner import runnable_engines
from .exits.policy import Calibration
from .generation.draft_gains import DraftCalibration
from .graphs.task_tensors import read_task_tensors
from .inputs.options import MEMORY_MB, THREADS
from .model import ElasticModel
from .tasks import bytes_of_tasks, merged_bundles, merged_bytes, require_no_cap

RESIDENCY = option(
    "Form of engines' weights: shared (mapped from the bundle), packed (a copy, fastest), mapped (packed, cached on "
    "disk), or auto (the fastest that memory allows).",
    "auto",
)
PROVIDER = option(
    "Execution provider of ONNX Runtime: the processor, CUDA with one copy of the weights, or TensorRT.",
    "cpu",
    choices=tuple(PROVIDERS),
)


@stated
def load(
    path: str | os.PathLike[str],
    *,
    memory_mb: float | None = again(MEMORY_MB, help="Memory limit of all engines and tasks together, in MB."),
    residency: Residency | Literal["auto"] = RESIDENCY,
    threads: int | None = THREADS,
    affinity: Sequence[int] | None = None,
    check: Check = "fast",
    preload: bool = False,
    provider: str = PROVIDER,
    merge: Sequence[str] = (),
) -> ElasticModel:
    """Opens a bundle as a model; engines and tokenizer open on first use, or at once with ``preload``.

    ``memory_mb`` counts weights, private initializers and activations; ``residency`` is decided under it, see
    ``assign_residencies``. Engines that generate, and the caches of their sessions, open later, under what the cap then
    leaves. ``affinity`` names the CPU of each thread of a run but the calling one (Linux alone); by default the system
    places them. None of them spins. With the ``provider`` cpu TensorRT plans run as such; never does another one answer
    than was requested. ``merge`` names tasks that are merged into the weights of engines of their own, packed whatever
    ``residency`` says; the tensors of others are inputs. ``check="full"`` reads every byte of the folder, what devices
    added included (docs/deployment.md). Raises a BundleError, InputError for an unknown name, for threads and CPUs
    beyond what this process may use, or SelectionError if the cap cannot be met.
    """
    if residency not in (*RESIDENCIES, "auto"):
        raise InputError(f"residency {residency!r}: expected one of auto, {', '.join(RESIDENCIES)}")
    ran_on = provider_named(provider)
    if ran_on is not None and affinity is not None:
        raise InputError(f"affinity: expected none with provider {provider!r}, which computes on a GPU")
    count, cpus = threads_and_affinity(threads, affinity)
    bundle = verify_bytes(path).bundle if check == "full" else open_bundle(path, check)
    if ran_on is not None and bundle.manifest.tasks is not None:
        raise InputError(
            f"provider {provider!r}: the engines of a bundle with tasks run on the processor; expected cpu"
        )
    engines = runnable_engines(bundle, ran_on)
    merged = merged_bundles(bundle, merge)
    require_no_cap(merged, bundle, memory_mb)
    left_mb, limit, of_tasks = memory_mb, None, 0
    if memory_mb is not None and (of_tasks := bytes_of_tasks(bundle, memory_mb, merged_bytes(merged.values()))):
        left_mb = memory_mb - of_tasks / 1e6
        limit = f"memory_mb={memory_mb:g}, {of_tasks / 1e6:.1f} MB of it the bundle's tasks"
    if ran_on is None:
        residencies = residencies_for(bundle, engines, left_mb, residency, limit)
    else:
        held: Residency = "shared" if ran_on.shares else "packed"
        if residency not in ("auto", held):
            raise InputError(f"residency {residency!r}: with provider {provider!r} expected auto or {held}")
        residencies = dict.fromkeys(residencies_for(bundle, engines, left_mb, held, limit), held)
    memory = None if memory_mb is None or bundle.manifest.generation is None else MemoryCap(bundle, memory_mb)
    if memory is not None:
        memory.take(memory.of_model, of_tasks, "the bundle's tasks", "remove tasks")
    model = ElasticModel(bundle, residencies, count, ran_on, cpus, residency, memory, merged)
    if preload:
        try:
            model.open_engines()
        except BaseException:
            model.close()
            raise
    return model


def opened(
    bundle: str | os.PathLike[str] | ElasticModel, residency: Residency | Literal["auto"] = "auto"
) -> AbstractContextManager[ElasticModel]:
    """The bundle as a model for the time of the context; a model that is open stays so."""
    return nullcontext(bundle) if isinstance(bundle, ElasticModel) else load(bundle, residency=residency)


@dataclass(frozen=True)
class CheckedBytes:
    """A bundle whose every byte is right: its listed ``files`` and their ``bytes``, calibrated ``policies``, ``plans``,
    ``measurements`` and ``drafts`` of hosts, and ``tasks``."""

    bundle: Bundle
    files: int
    bytes: int
    policies: int
    plans: int
    measurements: int
    drafts: int = 0
    tasks: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """All of these figures by name, as reports have them."""
        names = ("files", "bytes", "policies", "plans", "measurements", "tasks")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        added = (
            (self.policies, "calibrated policies"),
            (self.plans, "plans"),
            (self.measurements, "measurements of hosts"),
            (self.drafts, "calibrations of drafts"),
            (self.tasks, "tasks"),
        )
        also = "".join(f", {count} {what}" for count, what in added if count)
        return f"{self.files} files, {self.bytes / 1e6:.1f} MB{also}, every hash and seal as written"


def verify_bytes(path: str | os.PathLike[str]) -> CheckedBytes:
    """Checks all hashes and seals of the bundle in folder ``path``. Raises BundleFormatError or BundleCorruptError."""
    bundle = open_bundle(path, check="full")
    calibration, plans, measurements = Calibration.read(bundle), read_plans(bundle), Measurements.read(bundle)
    for plan in plans:
        read_plan(bundle, plan)
    tasks = read_tasks(bundle)
    for task in tasks:
        read_task_tensors(bundle, task)
    files = bundle.manifest.files
    policies = len(calibration.policies) if calibration else 0
    hosts = len(measurements.hosts) if measurements else 0
    drafts = DraftCalibration.read(bundle)
    calibrated = len(drafts.hosts) if drafts else 0
    size = sum(entry.bytes for entry in files)
    return CheckedBytes(bundle, len(files), size, policies, len(plans), hosts, calibrated, len(tasks))
