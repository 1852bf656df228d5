"""Which of a bundle's latencies say something about this host."""

from __future__ import annotations

from ..profiles.probe_host import probe_host
from .manifest import BuildRecord, Latency


def measured_elsewhere(build: BuildRecord) -> str | None:
    """The processor of the build record's measurements, or None where it is this host's or nothing was measured."""
    if all(latency.measured_p50_ms is None for latency in build.latencies):
        return None
    here = probe_host()
    if (build.host.get("cpu"), build.host.get("architecture")) == (here.cpu, here.architecture):
        return None
    return " ".join(str(build.host.get("cpu", "an unknown processor")).split())[:80]


def latencies_here(build: BuildRecord) -> tuple[Latency, ...]:
    """All latencies, or none if they were measured on another processor: its times do not say how the buckets of one
    engine compare on this one; tokens do, roughly."""
    return build.latencies if measured_elsewhere(build) is None else ()
