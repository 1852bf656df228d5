"""A latency at sizes that were measured, between them and beyond them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import Latency, LatencyPoint, Noise
from nestforge.runtime.engines.latencies import RunTime, latency_at, predicted_at


def measured(batch: int, sequence: int, ms: float) -> LatencyPoint:
    return LatencyPoint(batch, sequence, 2 * ms, ms, 3 * ms)


def test_one_figure_holds_at_every_size() -> None:
    assert latency_at(Latency("e", 3.0))(Bucket(1, 7)) == RunTime(3.0, 3.0, False)
    assert latency_at(Latency("e", 3.0, 2.0, 2.5))(Bucket(4, 7)) == RunTime(2.0, 2.5, True)
    assert latency_at(Latency("e", 3.0, 2.0))(Bucket(4, 7)) == RunTime(2.0, 2.0, True)


def test_known_sizes_are_as_measured_and_others_follow_a_power() -> None:
    at = latency_at(Latency("e", 9.0, points=tuple(measured(b, s, b * s**2 / 100) for b in (1, 4) for s in (8, 32))))
    assert at(Bucket(4, 8)) == RunTime(pytest.approx(2.56), pytest.approx(7.68), True)
    assert at(Bucket(1, 20)).p50_ms == pytest.approx(4.0)
    assert at(Bucket(3, 32)).p50_ms == pytest.approx(30.72)
    assert at(Bucket(2, 16)).p95_ms == pytest.approx(15.36)


def test_beyond_the_known_sizes_the_nearest_holds() -> None:
    at = latency_at(Latency("e", 9.0, points=(measured(2, 8, 1.0), measured(2, 32, 3.0))))
    assert at(Bucket(1, 2)).p50_ms == pytest.approx(1.0)
    assert at(Bucket(9, 99)).p50_ms == pytest.approx(3.0)


def test_without_a_measurement_predictions_hold() -> None:
    points = (LatencyPoint(1, 8, 1.0), LatencyPoint(1, 32, 4.0))
    assert latency_at(Latency("e", 4.0, points=points))(Bucket(1, 16)).p95_ms == pytest.approx(2.0)


def test_a_size_is_noisy_where_a_figure_beside_it_is() -> None:
    quiet, noisy = Noise(3, 0.1, 1.0), Noise(3, 0.1, 2.0)
    points = [replace(measured(1, s, s / 8.0), noise=noisy if s == 32 else quiet) for s in (8, 16, 32, 64)]
    at = latency_at(Latency("e", 9.0, points=tuple(points)))
    found = [at(Bucket(1, length)).is_noisy for length in (1, 8, 16, 17, 32, 33, 64, 99)]
    assert found == [False, False, False, True, True, True, False, False]
    assert latency_at(Latency("e", 3.0, 2.0, noise=noisy))(Bucket(1, 7)).is_noisy


def test_no_figure_of_a_file_is_too_large_to_interpolate() -> None:
    at = latency_at(Latency("e", 1.0, points=(measured(1, 8, 1.797e308), measured(1, 32, 1.797e308))))
    assert at(Bucket(1, 11)).p50_ms == pytest.approx(1e12)


def test_predictions_are_known_at_any_size_beside_measurements() -> None:
    points = (LatencyPoint(1, 8, 1.0, 9.0, 9.0), LatencyPoint(1, 32, 4.0, 9.0, 9.0))
    assert predicted_at(Latency("e", 4.0, 9.0, points=points))(Bucket(1, 16)) == pytest.approx(2.0)
    assert predicted_at(Latency("e", 4.0, 9.0))(Bucket(7, 9)) == 4.0


def test_without_a_percentile_the_spread_says_what_slow_runs_take() -> None:
    few = LatencyPoint(1, 8, 1.0, 10.0, None, Noise(3, 0.5, 1.0))
    assert latency_at(Latency("e", 1.0, points=(few,)))(Bucket(1, 8)).p95_ms == pytest.approx(16.1)
    assert latency_at(Latency("e", 1.0, 10.0))(Bucket(1, 8)).p95_ms == 10.0
