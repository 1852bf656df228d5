"""Latencies that hosts have measured themselves: what ``measurements.json`` in a bundle's folder holds, by host.

It is a file that a device adds, sealed (device_file.py), and names the manifest's hash. ``nestforge measure`` replaces
the figures of its own host and leaves those of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ...bucket import Bucket
from ...strict import unstructure
from ...whole_file import alone
from ..build_record import Noise
from ..entries.engine_entry import Residency
from ..manifest import MEASUREMENTS_NAME
from ..open_bundle import Bundle
from .device_file import (
    DEVICE_SCHEMA_VERSION,
    MeasuredHost,
    nearest_record,
    read_record,
    record_problems,
    with_record,
    write_device_file,
)

_REMEDY = "remove it and run `nestforge measure` again"


@dataclass(frozen=True)
class MeasuredPoint:
    """Median and 95th percentile of an engine at one shape, in milliseconds, with the noise of the median."""

    batch: int = field(metadata={"min": 1})
    sequence: int = field(metadata={"min": 1})
    p50_ms: float = field(metadata={"min": 0})
    noise: Noise
    p95_ms: float | None = field(default=None, metadata={"min": 0})


@dataclass(frozen=True)
class MeasuredEngine:
    """One engine (its id) in one residency: at its shape or, of a range, every batch of some at every sequence of
    some."""

    engine: str
    residency: Residency
    points: tuple[MeasuredPoint, ...]


@dataclass(frozen=True)
class HostMeasurement:
    """Measurements of ``host`` with ``threads`` cores per run; ``created`` is the time in UTC."""

    host: MeasuredHost
    threads: int = field(metadata={"min": 1})
    created: str
    engines: tuple[MeasuredEngine, ...]


@dataclass(frozen=True)
class Measurements:
    """The measurements of one bundle: one for each host and number of threads."""

    schema_version: int
    manifest_sha256: str
    hosts: tuple[HostMeasurement, ...]

    def of(self, host: MeasuredHost, threads: int) -> HostMeasurement | None:
        """The measurements of ``host`` with this number of threads, or the nearest to it."""
        return nearest_record(self.hosts, host, threads)


def read_measurements(bundle: Bundle) -> Measurements | None:
    """The measurements in the bundle's folder, or None where there are none.

    Raises BundleFormatError for what is malformed, BundleCorruptError for a wrong seal or those of another manifest.
    """
    return read_record(bundle, MEASUREMENTS_NAME, Measurements, _problems, _REMEDY)


def save_measurement(bundle: Bundle, measurement: HostMeasurement) -> Path:
    """Puts ``measurement`` in the place of an earlier one of its host and threads, beside those of others.

    Raises OutputError where it cannot be written, or there are too many hosts; BundleError where what is there cannot
    be read.
    """
    with alone(bundle.path):
        kept = read_measurements(bundle)
        hosts = with_record(kept.hosts if kept else (), measurement, bundle.path / MEASUREMENTS_NAME)
        every = Measurements(DEVICE_SCHEMA_VERSION, bundle.build.manifest_sha256, hosts)
        return write_device_file(bundle, MEASUREMENTS_NAME, unstructure(every), "the measurement")


def _problems(found: Measurements, bundle: Bundle) -> Iterable[str]:
    """Checks beyond the types: engines that exist, shapes that they have, one figure for each."""
    engines = {engine.id: engine for engine in bundle.manifest.timed_engines}
    yield from record_problems(found.hosts)
    for number, measurement in enumerate(found.hosts):
        where = f"hosts[{number}]"
        if len({(each.engine, each.residency) for each in measurement.engines}) < len(measurement.engines):
            yield f"{where}: an engine in one residency stands twice"
        for each in measurement.engines:
            if each.engine not in engines:
                yield f"{where}: engine {each.engine[:80]!r} is not in this bundle"
                continue
            sizes = {Bucket(point.batch, point.sequence) for point in each.points}
            grid = len({size.batch for size in sizes}) * len({size.sequence for size in sizes})
            if not each.points or not len(sizes) == grid == len(each.points):
                yield f"{where}: points of engine {each.engine}; expected every batch at every sequence once"
            bucket = engines[each.engine].bucket
            if wrong := [size for size in sizes if bucket.filled(size) != size or not bucket.holds(size)]:
                yield f"{where}: engine {each.engine} does not run at {wrong[0].label}"
            for point in each.points:
                if point.p95_ms is not None and point.p95_ms < point.p50_ms:
                    yield f"{where}: engine {each.engine}: p95_ms {point.p95_ms} below p50_ms {point.p50_ms}"
