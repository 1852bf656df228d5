"""A bundle's engines measured on this host, as a record that the bundle keeps beside those of other hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone

from ...bundle.device_files.measurements import HostMeasurement, MeasuredEngine, MeasuredPoint
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.merged_task import BASE
from ...bundle.open_bundle import Bundle
from ...profiles.host_load import others_now, require_quiet
from ..inputs.feeds import random_feeds
from .contract.residency import Residency
from .contract.threads import threads_or_default
from .host_latencies import measuring_host
from .measure_rounds import Timed, best_of_rounds, measured_shapes, measured_together
from .needs import residencies_for
from .runner import runnable_engines, runner_for

# Called with a stage, how many of its parts are done, and how many there are.
Progress = Callable[[str, int, int], None]
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class BundleMeasurement:
    """What was measured; ``left_out`` says of engines that were not, by id, why."""

    measurement: HostMeasurement
    left_out: Mapping[str, str]


def measure_bundle(
    bundle: Bundle,
    progress: Progress,
    *,
    threads: int | None = None,
    memory_mb: float | None = None,
    force: bool = False,
) -> BundleMeasurement:
    """Times every engine that can run here, in the residency that it would have under ``memory_mb``, on ``threads``
    cores (by default the ones that this process may use).

    Raises MeasurementError on a host that is too busy to measure, unless ``force``; BundleIncompatibleError where no
    engine can run, SelectionError where none fits the memory.
    """
    cores = threads_or_default(threads)
    engines = runnable_engines(bundle)
    residencies = residencies_for(bundle, engines, memory_mb)
    if not force:
        require_quiet(others_now(_LOOK_SECONDS))
    merged = bundle.with_merged(BASE)
    held: dict[str, Residency] = {
        **residencies,
        **dict.fromkeys((engine.id for engine in merged.manifest.engines), "packed"),
    }
    taking_part = [engine for engine in (*engines, *merged.manifest.engines) if engine.id in held]
    groups = [
        (one, group)
        for one in (bundle, merged)
        for group in measured_together([engine for engine in one.manifest.engines if engine in taking_part])
    ]
    by_file: dict[str, tuple[MeasuredPoint, ...]] = {}
    for done, (one, group) in enumerate(groups):
        progress("measure", done, len(groups))
        by_file |= _measured(one, group, held, cores)
    progress("measure", len(groups), len(groups))
    if not force:  # it may have become busy since
        shares = [point.noise.others_share for points in by_file.values() for point in points]
        require_quiet(min((share for share in shares if share is not None), default=None))
    measured = tuple(MeasuredEngine(one.id, held[one.id], by_file[one.file]) for one in taking_part)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    runnable = {engine.id for engine in engines}
    left_out = {
        engine.id: "no memory" if engine.id in runnable else f"no backend {engine.backend} here"
        for engine in bundle.manifest.engines
        if engine.id not in residencies
    }
    return BundleMeasurement(HostMeasurement(measuring_host(bundle), cores, created, measured), left_out)


def _measured(
    bundle: Bundle, engines: Sequence[EngineEntry], residencies: Mapping[str, Residency], threads: int
) -> dict[str, tuple[MeasuredPoint, ...]]:
    """By file, the figures of ``engines`` at their shapes."""
    shapes = [(engine, shape) for engine in engines for shape in measured_shapes(engine.bucket)]
    with ExitStack() as stack:
        runners = {
            engine.file: stack.enter_context(runner_for(bundle, engine, residencies[engine.id], threads))
            for engine in engines
        }
        timed = [
            Timed(
                runners[engine.file],
                random_feeds(bundle.manifest.interface_of(engine)[0], shape),
                engine.bucket.is_static,
            )
            for engine, shape in shapes
        ]
        found: dict[str, tuple[MeasuredPoint, ...]] = {}
        for (engine, shape), measured in zip(shapes, best_of_rounds(timed), strict=True):
            point = MeasuredPoint(shape.batch, shape.sequence, measured.p50_ms, measured.noise, measured.p95_ms)
            found[engine.file] = (*found.get(engine.file, ()), point)
    return found
