"""Latencies that hosts have measured themselves: what ``measurements.json`` in a bundle's folder holds, by host.

It is a file that a device adds, sealed (device_file.py), and names the manifest's hash. ``nestforge measure`` replaces
the figures of its own host and leaves those of others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...bucket import Bucket
from ..build_record import Noise, is_grid
from ..entries.engine_entry import Residency
from ..manifest import MEASUREMENTS_NAME
from ..open_bundle import Bundle
from .device_file import HostRecord, HostRecords


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
class HostMeasurement(HostRecord):
    """Measurements of one host."""

    engines: tuple[MeasuredEngine, ...]


@dataclass(frozen=True)
class Measurements(HostRecords[HostMeasurement]):
    """The measurements of one bundle."""

    name = MEASUREMENTS_NAME
    mend = "remove it and run `nestforge measure` again"
    lost = "the measurement"

    hosts: tuple[HostMeasurement, ...]

    @staticmethod
    def record_problems(record: HostMeasurement, bundle: Bundle) -> Iterator[str]:
        """Engines that exist, shapes that they have, one figure for each."""
        engines = {engine.id: engine for engine in bundle.manifest.timed_engines}
        if len({(each.engine, each.residency) for each in record.engines}) < len(record.engines):
            yield "an engine in one residency stands twice"
        for each in record.engines:
            if each.engine not in engines:
                yield f"engine {each.engine[:80]!r} is not in this bundle"
                continue
            sizes = {Bucket(point.batch, point.sequence) for point in each.points}
            if not is_grid([(point.batch, point.sequence) for point in each.points]):
                yield f"points of engine {each.engine}; expected every batch at every sequence once"
            bucket = engines[each.engine].bucket
            if wrong := [size for size in sizes if bucket.filled(size) != size or not bucket.holds(size)]:
                yield f"engine {each.engine} does not run at {wrong[0].label}"
            for point in each.points:
                if point.p95_ms is not None and point.p95_ms < point.p50_ms:
                    yield f"engine {each.engine}: p95_ms {point.p95_ms} below p50_ms {point.p50_ms}"
