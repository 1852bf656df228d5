import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import BuildRecord, LatencyPoint, Noise
from nestforge.bundle.device_files.device_file import this_host
from nestforge.bundle.device_files.measurements import HostMeasurement, MeasuredEngine, MeasuredPoint, Measurements
from nestforge.bundle.device_files.plan_index import Gpu
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.profiles.probe_host import probe_host
from nestforge.runtime.engines import tensorrt
from nestforge.runtime.engines.latencies import (
    RunTime,
    _latency,
    host_latencies,
    latency_at,
    measured_elsewhere,
    measuring_host,
    predicted_at,
)
from support.latencies import latency

NOISE = Noise(20, 0.05, 1.01, 0.0)


def with_record(bundle: Path, cpu: str, measured: float | None) -> Bundle:
    opened = open_bundle(bundle)
    latencies = tuple(
        latency(one.engine, one.largest.predicted_ms, measured, residency=one.residency)
        for one in opened.build.latencies
    )
    assert latencies
    host = {"cpu": cpu, "architecture": probe_host().architecture}
    return replace(opened, build=replace(opened.build, host=host, latencies=latencies))


def measured(threads: int, p50_ms: float) -> HostMeasurement:
    engines = (MeasuredEngine("ffn16@b1-s8", "shared", (MeasuredPoint(1, 8, p50_ms, NOISE, 2 * p50_ms),)),)
    return HostMeasurement(this_host(), threads, "2026-11-22T10:00:00+00:00", engines)


def test_what_was_measured_on_this_processor_counts(tiny_bundle: Path) -> None:
    bundle = with_record(tiny_bundle, probe_host().cpu, 1.0)
    assert measured_elsewhere(bundle.build) is None
    assert host_latencies(bundle, 2).of_chains == bundle.build.latencies


def test_what_was_measured_on_another_or_runs_on_a_gpu_does_not(tiny_bundle: Path) -> None:
    other = with_record(tiny_bundle, "Some  other\nprocessor", 1.0)
    assert measured_elsewhere(other.build) == "Some other processor"
    assert host_latencies(other, 2).of_chains == ()
    assert host_latencies(other, 2).latencies == other.build.latencies
    assert host_latencies(with_record(tiny_bundle, probe_host().cpu, 1.0), 2, on_gpu=True).of_chains == ()


def test_predictions_hold_anywhere(tiny_bundle: Path) -> None:
    bundle = with_record(tiny_bundle, "Some other processor", None)
    assert measured_elsewhere(bundle.build, on_gpu=True) is None
    assert host_latencies(bundle, 2, on_gpu=True).of_chains == bundle.build.latencies


def test_plans_are_measured_by_the_host_with_its_gpu(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measuring_host(bundle) == this_host()
    engines = tuple(replace(engine, backend="tensorrt") for engine in bundle.manifest.engines)
    bundle = replace(bundle, manifest=replace(bundle.manifest, engines=engines))
    monkeypatch.setattr(tensorrt, "problem", lambda: "no TensorRT")
    assert measuring_host(bundle) == this_host()
    engine_module = ModuleType("engine")
    engine_module.this_gpu = lambda: Gpu("NVIDIA L4", "8.9", "10.3.0")
    monkeypatch.setitem(sys.modules, "nestforge.runtime.engines.tensorrt.engine", engine_module)
    monkeypatch.setattr(tensorrt, "problem", lambda: None)
    here = measuring_host(bundle)
    assert here == replace(this_host(), others="NVIDIA L4 (compute capability 8.9, TensorRT 10.3.0)")
    assert str(here).endswith(", NVIDIA L4 (compute capability 8.9, TensorRT 10.3.0)")


def test_what_this_host_measured_comes_first_with_its_own_threads(own_bundle: Path) -> None:
    bundle = with_record(own_bundle, "Some other processor", 9.0)
    for threads, p50_ms in ((1, 3.0), (2, 2.0)):
        Measurements.save(bundle, measured(threads, p50_ms))
    for threads, p50_ms in ((1, 3.0), (2, 2.0)):
        found = host_latencies(bundle, threads)
        assert (found.elsewhere, found.measurement) == (None, measured(threads, p50_ms))
        mine, *others = found.latencies
        stated = next(one for one in bundle.build.latencies if one.engine == "ffn16@b1-s8")
        point = LatencyPoint(1, 8, stated.largest.predicted_ms, p50_ms, 2 * p50_ms, NOISE)
        assert mine == latency("ffn16@b1-s8", residency="shared", points=[point])
        assert not any(one.is_measured for one in others), "another processor's figures are none of this one"
        assert {one.engine for one in others} == {one.engine for one in bundle.build.latencies} - {"ffn16@b1-s8"}
        assert found.of_chains == found.latencies
    assert host_latencies(bundle, 1, on_gpu=True).measurement is None
    assert host_latencies(bundle, 1, on_gpu=True).elsewhere == "Some other processor"


def test_of_other_numbers_of_threads_the_nearest_counts_unless_the_compile_measured_here(own_bundle: Path) -> None:
    bundle = with_record(own_bundle, "Some other processor", 9.0)
    for threads in (1, 7):
        Measurements.save(bundle, measured(threads, float(threads)))
    assert host_latencies(bundle, 8).measurement == measured(7, 7.0)
    assert host_latencies(with_record(own_bundle, probe_host().cpu, 9.0), 8).measurement is None


def test_what_the_compile_measured_here_stays_for_engines_that_were_left_out(own_bundle: Path) -> None:
    bundle = with_record(own_bundle, probe_host().cpu, 9.0)
    Measurements.save(bundle, measured(2, 2.0))
    found = host_latencies(bundle, 2).latencies
    assert {one.largest.measured_p50_ms for one in found if one.engine != "ffn16@b1-s8"} == {9.0}


def test_a_range_keeps_its_predictions_at_the_shapes_that_were_measured() -> None:
    stated = latency("e", 8.0, points=(LatencyPoint(1, 8, 1.0), LatencyPoint(1, 32, 4.0)))
    points = (MeasuredPoint(1, 16, 3.0, NOISE), MeasuredPoint(1, 32, 5.0, NOISE, 6.0))
    found = _latency(stated, MeasuredEngine("e", "packed", points))
    assert found.points == (
        LatencyPoint(1, 16, pytest.approx(2.0), 3.0, None, NOISE),
        LatencyPoint(1, 32, pytest.approx(4.0), 5.0, 6.0, NOISE),
    )
    assert (found.largest, found.residency) == (found.points[-1], "packed")


def test_a_build_record_of_no_host_is_elsewhere(tiny_bundle: Path) -> None:
    record: BuildRecord = with_record(tiny_bundle, "x", 1.0).build
    assert measured_elsewhere(replace(record, host={})) == "an unknown processor"


def point_at(batch: int, sequence: int, ms: float) -> LatencyPoint:
    return LatencyPoint(batch, sequence, 2 * ms, ms, 3 * ms)


def test_one_figure_holds_at_every_size() -> None:
    assert latency_at(latency("e", 3.0))(Bucket(1, 7)) == RunTime(3.0, 3.0, False)
    assert latency_at(latency("e", 3.0, 2.0, 2.5))(Bucket(4, 7)) == RunTime(2.0, 2.5, True)
    assert latency_at(latency("e", 3.0, 2.0))(Bucket(4, 7)) == RunTime(2.0, 2.0, True)


def test_known_sizes_are_as_measured_and_others_follow_a_power() -> None:
    at = latency_at(latency("e", 9.0, points=tuple(point_at(b, s, b * s**2 / 100) for b in (1, 4) for s in (8, 32))))
    assert at(Bucket(4, 8)) == RunTime(pytest.approx(2.56), pytest.approx(7.68), True)
    assert at(Bucket(1, 20)).p50_ms == pytest.approx(4.0)
    assert at(Bucket(3, 32)).p50_ms == pytest.approx(30.72)
    assert at(Bucket(2, 16)).p95_ms == pytest.approx(15.36)


def test_beyond_the_known_sizes_the_nearest_holds() -> None:
    at = latency_at(latency("e", 9.0, points=(point_at(2, 8, 1.0), point_at(2, 32, 3.0))))
    assert at(Bucket(1, 2)).p50_ms == pytest.approx(1.0)
    assert at(Bucket(9, 99)).p50_ms == pytest.approx(3.0)


def test_without_a_measurement_predictions_hold() -> None:
    points = (LatencyPoint(1, 8, 1.0), LatencyPoint(1, 32, 4.0))
    assert latency_at(latency("e", 4.0, points=points))(Bucket(1, 16)).p95_ms == pytest.approx(2.0)


def test_a_size_is_noisy_where_a_figure_beside_it_is() -> None:
    quiet, noisy = Noise(3, 0.1, 1.0), Noise(3, 0.1, 2.0)
    points = [replace(point_at(1, s, s / 8.0), noise=noisy if s == 32 else quiet) for s in (8, 16, 32, 64)]
    at = latency_at(latency("e", 9.0, points=tuple(points)))
    found = [at(Bucket(1, length)).is_noisy for length in (1, 8, 16, 17, 32, 33, 64, 99)]
    assert found == [False, False, False, True, True, True, False, False]
    assert latency_at(latency("e", 3.0, 2.0, noise=noisy))(Bucket(1, 7)).is_noisy


def test_no_figure_of_a_file_is_too_large_to_interpolate() -> None:
    at = latency_at(latency("e", 1.0, points=(point_at(1, 8, 1.797e308), point_at(1, 32, 1.797e308))))
    assert at(Bucket(1, 11)).p50_ms == pytest.approx(1e12)


def test_predictions_are_known_at_any_size_beside_measurements() -> None:
    points = (LatencyPoint(1, 8, 1.0, 9.0, 9.0), LatencyPoint(1, 32, 4.0, 9.0, 9.0))
    assert predicted_at(latency("e", 4.0, 9.0, points=points))(Bucket(1, 16)) == pytest.approx(2.0)
    assert predicted_at(latency("e", 4.0, 9.0))(Bucket(7, 9)) == 4.0


def test_without_a_percentile_the_spread_says_what_slow_runs_take() -> None:
    few = LatencyPoint(1, 8, 1.0, 10.0, None, Noise(3, 0.5, 1.0))
    assert latency_at(latency("e", 1.0, points=(few,)))(Bucket(1, 8)).p95_ms == pytest.approx(16.1)
    assert latency_at(latency("e", 1.0, 10.0))(Bucket(1, 8)).p95_ms == 10.0
