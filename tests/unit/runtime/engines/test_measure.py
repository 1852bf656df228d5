from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import BundleError, SelectionError
from nestforge.runtime.engines import measure as measure_module
from nestforge.runtime.engines.measure import LatencyStats, latency_stats, measure, memory_use, times_of


class FakeRunner:
    """Counts runs; each takes the next duration of a fake clock, in seconds."""

    def __init__(self, durations: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.runs = 0
        self.durations = durations
        monkeypatch.setattr(measure_module, "perf_counter", lambda: self.now)

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        self.now += self.durations[self.runs % len(self.durations)]
        self.runs += 1
        return []


def test_slow_engines_run_the_least_number(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner([1.0], monkeypatch)
    stats = measure(runner, {}, warmup=2, min_runs=4, max_seconds=2.0)  # type: ignore[arg-type]
    assert stats == LatencyStats(4, 1000.0, 1000.0, 1000.0, 0.0)
    assert runner.runs == 6


def test_quick_engines_run_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner([0.25], monkeypatch)
    assert measure(runner, {}, warmup=0, min_runs=2, max_seconds=5.0).runs == 20  # type: ignore[arg-type]


def test_percentiles(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner([i / 1000 for i in range(101)], monkeypatch)
    stats = latency_stats(times_of(lambda: runner.run({}), warmup=0, min_runs=101, max_seconds=0))
    assert (stats.runs, round(stats.p50, 6), round(stats.p95, 6), round(stats.p99, 6)) == (101, 50, 95, 99)
    assert stats.spread == pytest.approx(1.0), "50 ms between the quartiles, 50 ms the median"


def test_memory_is_measured_in_a_process_of_its_own(tiny_bundle: Path) -> None:
    use = memory_use(tiny_bundle, ["ffn16@b1-s8", "ffn32@b2-s16"], "shared")
    assert 0 < use.private <= use.resident < 500e6


def test_memory_of_an_unknown_or_broken_engine(own_bundle: Path) -> None:
    with pytest.raises(SelectionError, match="no engine 'ffn1' in this bundle; it has ffn16@b1-s8, "):
        memory_use(own_bundle, ["ffn1"], "shared")
    path = own_bundle / "ffn16.b1-s8.onnx"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(BundleError, match=r"measuring memory failed: .*ffn16.b1-s8.onnx: sha256 \w+, expected \w+"):
        memory_use(own_bundle, ["ffn16@b1-s8"], "shared")
