"""What a bundle states of its engines' latencies for this host: what the host measured, else the build record."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...bucket import Bucket
from ...bundle.build_record import BuildRecord, Latency, LatencyPoint
from ...bundle.device_files.host_records import MeasuredHost, this_host
from ...bundle.device_files.measurements import HostMeasurement, MeasuredEngine, read_measurements
from ...bundle.open_bundle import Bundle
from ...profiles.probe_host import probe_host
from .latency_at import latency_at
from .tensorrt.available import tensorrt_problem


@dataclass(frozen=True)
class HostLatencies:
    """What is known of each engine; ``elsewhere`` is the processor that measured, or None where it is this host's or
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
    measurements = read_measurements(bundle)
    found = None if measurements is None or on_gpu else measurements.of(measuring_host(bundle), threads)
    measured_here = elsewhere is None and any(one.measured_p50_ms is not None for one in bundle.build.latencies)
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
    """This host, as figures of the bundle's engines depend on it: with its GPU where there are plans to run on it.

    Raises BundleError where the GPU does not say what it is.
    """
    plans = any(engine.backend == "tensorrt" for engine in bundle.manifest.engines)
    if not plans or tensorrt_problem() is not None:
        return this_host()
    from .tensorrt.engine import this_gpu

    return replace(this_host(), gpu=str(this_gpu()))


def measured_elsewhere(build: BuildRecord, on_gpu: bool = False) -> str | None:
    """The processor of the build record's measurements, or None where it is this host's or nothing was measured; with
    ``on_gpu`` engines run on none, so that any measurement was made elsewhere."""
    if all(latency.measured_p50_ms is None for latency in build.latencies):
        return None
    here = probe_host()
    if not on_gpu and (build.host.get("cpu"), build.host.get("architecture")) == (here.cpu, here.architecture):
        return None
    return " ".join(str(build.host.get("cpu", "an unknown processor")).split())[:80]


def as_predicted(latency: Latency) -> Latency:
    """``latency`` without what was measured."""
    points = latency.points and tuple(
        LatencyPoint(point.batch, point.sequence, point.predicted_ms) for point in latency.points
    )
    return Latency(latency.engine, latency.predicted_ms, points=points)


def _latency(stated: Latency | None, measured: MeasuredEngine) -> Latency:
    """``measured`` beside the prediction in ``stated``, at the same shapes; without one it is not used either."""
    largest = measured.points[-1]
    predicted = latency_at(stated or Latency(measured.engine, largest.p50_ms))
    points = tuple(
        LatencyPoint(
            point.batch,
            point.sequence,
            predicted(Bucket(point.batch, point.sequence)).p50_ms,
            point.p50_ms,
            point.p95_ms,
            point.noise,
        )
        for point in measured.points
    )
    last = points[-1]
    alone = Latency(
        measured.engine,
        last.predicted_ms,
        last.measured_p50_ms,
        last.measured_p95_ms,
        measured.residency,
        noise=last.noise,
    )
    return alone if len(points) == 1 else replace(alone, points=points)
