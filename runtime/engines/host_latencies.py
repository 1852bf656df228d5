"""Which of a bundle's latencies say something about this host."""

from __future__ import annotations

from ...profiles.probe_host import probe_host
from ..bundle.manifest import BuildRecord, Latency


def measured_elsewhere(build: BuildRecord, on_gpu: bool = False) -> str | None:
    """The processor of the build record's measurements, or None where it is this host's or nothing was measured; with
    ``on_gpu`` engines run on none, so that any measurement was made elsewhere."""
    if all(latency.measured_p50_ms is None for latency in build.latencies):
        return None
    here = probe_host()
    if not on_gpu and (build.host.get("cpu"), build.host.get("architecture")) == (here.cpu, here.architecture):
        return None
    return " ".join(str(build.host.get("cpu", "an unknown processor")).split())[:80]


def host_latencies(build: BuildRecord, on_gpu: bool = False) -> tuple[Latency, ...]:
    """All latencies, or none if they were measured on another processor than that which runs engines: its times do not
    say how the buckets of one engine compare on this one; tokens do, roughly."""
    return build.latencies if measured_elsewhere(build, on_gpu) is None else ()
