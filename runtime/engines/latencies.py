"""Latencies of a bundle's engines on this host: what it measured, else the build record's, at any size of a range.

Between neighbouring lengths times are interpolated on logarithmic scales, where work that grows with a power of the
length lies on a line; between numbers of rows linearly, since each further row adds the same work, and few rows cost
less than a power through many would say. Outside the sizes that are known the nearest ones hold.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from ...bucket import Bucket
from ...bundle.build_record import BuildRecord, Latency, LatencyPoint, is_noisy
from ...bundle.device_files.device_file import MeasuredHost, this_host
from ...bundle.device_files.measurements import HostMeasurement, MeasuredEngine, Measurements
from ...bundle.open_bundle import Bundle
from ...profiles.backends import ONNXRUNTIME
from ...profiles.probe_host import probe_host
from .runner import opener

# Limits of latencies in a file; a logarithm needs the one, and its inverse the other.
_LEAST_MS = 1e-6
_MOST_MS = 1e12
# In a normal distribution: how far its 95th percentile lies above the median, in interquartile ranges.
_P95_PER_SPREAD = 1.22


@dataclass(frozen=True)
class RunTime:
    """Milliseconds of a run: the median, and ``p95_ms``, which 95 of 100 runs keep; of a prediction they are equal.
    ``is_noisy``: they rest on a measurement that is not to be trusted."""

    p50_ms: float
    p95_ms: float
    measured: bool
    is_noisy: bool = False


def latency_at(latency: Latency) -> Callable[[Bucket], RunTime]:
    """The latency of an engine as a function of the shape that it runs at: as measured, else predicted."""
    points = {(point.batch, point.sequence): point for point in latency.points}
    known = {
        size: (point.measured_p50_ms, _slow(point, point.measured_p50_ms))
        for size, point in points.items()
        if point.measured_p50_ms is not None
    }
    measured = bool(known)
    known = known or {size: (point.predicted_ms, point.predicted_ms) for size, point in points.items()}
    median = interpolated({size: p50 for size, (p50, _) in known.items()})
    slow = interpolated({size: p95 for size, (_, p95) in known.items()})
    noisy = {size for size, point in points.items() if is_noisy(point.noise)} if measured else set()
    batches, sequences = _axes(known)

    def at(shape: Bucket) -> RunTime:
        near = (
            (batch, sequence)
            for batch, _ in _neighbours(batches, shape.batch, float)
            for sequence, _ in _neighbours(sequences, shape.sequence, log)
        )
        return RunTime(median(shape), slow(shape), measured, bool(noisy) and not noisy.isdisjoint(near))

    return at


def _slow(point: LatencyPoint, p50_ms: float) -> float:
    """The 95th percentile; where too few runs were made for one, that of a normal distribution of their spread."""
    if point.measured_p95_ms is not None:
        return point.measured_p95_ms
    return p50_ms * (1 + _P95_PER_SPREAD * (point.noise.spread if point.noise else 0.0))


def predicted_at(latency: Latency) -> Callable[[Bucket], float]:
    """Predicted latency of an engine in milliseconds, as a function of the shape that it runs at."""
    return interpolated({(point.batch, point.sequence): point.predicted_ms for point in latency.points})


def interpolated(known: Mapping[tuple[int, int], float]) -> Callable[[Bucket], float]:
    """Times as a function of the shape, from those ``known`` at every batch of some and every sequence of some."""
    if len(known) == 1:
        (only,) = known.values()
        return lambda _: only
    batches, sequences = _axes(known)
    logs = {size: log(min(max(ms, _LEAST_MS), _MOST_MS)) for size, ms in known.items()}

    def at(shape: Bucket) -> float:
        lengths = _neighbours(sequences, shape.sequence, log)
        return sum(
            share * exp(sum(part * logs[batch, sequence] for sequence, part in lengths))
            for batch, share in _neighbours(batches, shape.batch, float)
        )

    return at


def _axes(known: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The batches and the sequences of a grid of sizes, rising."""
    batches, sequences = zip(*known, strict=True)
    return sorted(set(batches)), sorted(set(sequences))


def _neighbours(sizes: Sequence[int], size: int, scale: Callable[[int], float]) -> list[tuple[int, float]]:
    """The known sizes around ``size``, and the weight of each on ``scale``."""
    above = bisect_right(sizes, size)
    if above == 0 or above == len(sizes) or sizes[above - 1] == size:
        return [(sizes[max(0, above - 1)], 1.0)]
    low, high = sizes[above - 1], sizes[above]
    weight = (scale(size) - scale(low)) / (scale(high) - scale(low))
    return [(low, 1 - weight), (high, weight)]


@dataclass(frozen=True)
class HostLatencies:
    """Latencies of each engine; ``elsewhere`` is the processor that measured, or None where it is this host's or
    nothing was measured. ``measurement`` is this host's own, which ``latencies`` then have."""

    latencies: tuple[Latency, ...]
    elsewhere: str | None
    measurement: HostMeasurement | None = None

    @property
    def of_chains(self) -> tuple[Latency, ...]:
        """All latencies, or none if they were measured on another processor than that which runs engines: its times do
        not say how the buckets of one engine compare on this one; tokens do, roughly."""
        return self.latencies if self.elsewhere is None else ()


def host_latencies(bundle: Bundle, threads: int, on_gpu: bool = False) -> HostLatencies:
    """The latencies for engines that run here on ``threads`` cores, or ``on_gpu``, where no processor's figures hold.

    Raises a BundleError where the bundle's measurements cannot be read.
    """
    elsewhere = measured_elsewhere(bundle.build, on_gpu)
    measurements = Measurements.read(bundle)
    found = None if measurements is None or on_gpu else measurements.of(measuring_host(bundle), threads)
    measured_here = elsewhere is None and any(one.is_measured for one in bundle.build.latencies)
    if found is None or (found.threads != threads and measured_here):
        return HostLatencies(bundle.build.latencies, elsewhere)
    stated: dict[str, Latency] = {}
    for latency in bundle.build.latencies:
        stated.setdefault(latency.engine, as_predicted(latency))
    mine = [_latency(stated.get(each.engine), each) for each in found.engines]
    measured = {each.engine for each in found.engines}
    others = [one for one in bundle.build.latencies if one.engine not in measured]
    if elsewhere is not None:
        others = list(map(as_predicted, others))
    return HostLatencies((*mine, *others), None, found)


def measuring_host(bundle: Bundle) -> MeasuredHost:
    """This host, as figures of the bundle's engines depend on it: with what those run on that are of another back end
    than ONNX Runtime, such as a GPU.

    Raises BundleError where the GPU does not say what it is.
    """
    others = sorted({engine.backend for engine in bundle.manifest.engines} - {ONNXRUNTIME.name})
    here = [opener(backend).described() for backend in others if opener(backend).problem() is None]
    return replace(this_host(), others=", ".join(here) or None)


def measured_elsewhere(build: BuildRecord, on_gpu: bool = False) -> str | None:
    """The processor of the build record's measurements, or None where it is this host's or nothing was measured; with
    ``on_gpu`` engines run on none, so that any measurement was made elsewhere."""
    if not any(latency.is_measured for latency in build.latencies):
        return None
    here = probe_host()
    if not on_gpu and (build.host.get("cpu"), build.host.get("architecture")) == (here.cpu, here.architecture):
        return None
    return " ".join(str(build.host.get("cpu", "an unknown processor")).split())[:80]


def as_predicted(latency: Latency) -> Latency:
    """``latency`` without what was measured."""
    points = (LatencyPoint(point.batch, point.sequence, point.predicted_ms) for point in latency.points)
    return Latency(latency.engine, tuple(points))


def _latency(stated: Latency | None, measured: MeasuredEngine) -> Latency:
    """``measured`` beside the prediction in ``stated``, at the same shapes; without one it is not used either."""
    at = predicted_at(stated) if stated else lambda _: measured.points[-1].p50_ms
    points = (
        LatencyPoint(
            each.batch, each.sequence, at(Bucket(each.batch, each.sequence)), each.p50_ms, each.p95_ms, each.noise
        )
        for each in measured.points
    )
    return Latency(measured.engine, tuple(points), measured.residency)
