from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nestforge.profiles.probe_host import probe_host
from nestforge.runtime.bundle.manifest import BuildRecord
from nestforge.runtime.bundle.open_bundle import open_bundle
from nestforge.runtime.engines.host_latencies import host_latencies, measured_elsewhere


def record(bundle: Path, cpu: str, measured: float | None) -> BuildRecord:
    build = open_bundle(bundle).build
    latencies = tuple(replace(latency, measured_p50_ms=measured) for latency in build.latencies)
    assert latencies
    return replace(build, host={"cpu": cpu, "architecture": probe_host().architecture}, latencies=latencies)


def test_what_was_measured_on_this_processor_counts(tiny_bundle: Path) -> None:
    build = record(tiny_bundle, probe_host().cpu, 1.0)
    assert measured_elsewhere(build) is None
    assert host_latencies(build) == build.latencies


def test_what_was_measured_on_another_or_runs_on_a_gpu_does_not(tiny_bundle: Path) -> None:
    other = record(tiny_bundle, "Some  other\nprocessor", 1.0)
    assert measured_elsewhere(other) == "Some other processor"
    assert host_latencies(other) == ()
    assert host_latencies(record(tiny_bundle, probe_host().cpu, 1.0), on_gpu=True) == ()


def test_predictions_hold_anywhere(tiny_bundle: Path) -> None:
    build = record(tiny_bundle, "Some other processor", None)
    assert measured_elsewhere(build, on_gpu=True) is None
    assert host_latencies(build, on_gpu=True) == build.latencies
