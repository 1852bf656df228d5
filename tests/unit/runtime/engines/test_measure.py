from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import Noise
from nestforge.bundle.device_files.device_file import this_host
from nestforge.bundle.entries.engine_entry import Segment
from nestforge.bundle.manifest import Manifest
from nestforge.bundle.open_bundle import Bundle, open_bundle
from nestforge.errors import BundleError, MeasurementError, SelectionError
from nestforge.runtime.engines import measure as measure_module
from nestforge.runtime.engines import measure as measuring
from nestforge.runtime.engines.measure import (
    LatencyStats,
    Measured,
    Timed,
    best_of_rounds,
    latency_stats,
    measure,
    measure_bundle,
    measured_shapes,
    measured_together,
    memory_use,
    times_of,
)


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
    stats = measure(runner, {}, warmup=2, min_runs=4, max_seconds=2.0)
    assert stats == LatencyStats(4, 1000.0, 1000.0, 1000.0, 0.0)
    assert runner.runs == 6


def test_quick_engines_run_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner([0.25], monkeypatch)
    assert measure(runner, {}, warmup=0, min_runs=2, max_seconds=5.0).runs == 20


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


class TimedRunner:
    """Has the times of its rounds, in milliseconds, behind a name."""

    def __init__(self, name: str, rounds: list[list[float]]) -> None:
        self.name, self.rounds = name, rounds

    def run(self, feeds: Any) -> None:
        raise AssertionError("never run")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Each round in order: the engine's name, runs to warm up, and the least number of timed ones."""
    order: list[tuple[str, int, int]] = []

    def fake(call: Any, *, warmup: int, min_runs: int, **_: Any) -> list[float]:
        runner = call.func.__self__
        number = sum(name == runner.name for name, *_ in order)
        order.append((runner.name, warmup, min_runs))
        return runner.rounds[number]

    class Quiet:
        def share(self) -> float:
            return 0.125

    monkeypatch.setattr(measuring, "times_of", fake)
    monkeypatch.setattr(measuring, "OthersLoad", Quiet)
    return order


def test_the_best_round_counts_and_the_next_best_says_how_far(made_up: list[tuple[str, int, int]]) -> None:
    slow = [9.0] * 10
    engines: Any = [TimedRunner("a", [[2.0] * 10, slow, [2.5] * 10]), TimedRunner("b", [[4.0] * 20] * 3)]
    found = best_of_rounds([Timed(runner, {}, True) for runner in engines])
    assert made_up == [("a", 3, 10), ("b", 3, 10)] * 3, "in turns"
    assert found == [
        Measured(2.0, 2.0, Noise(30, (9.0 - 2.0) / 2.5, 1.25, 0.125)),
        Measured(4.0, 4.0, Noise(60, 0.0, 1.0, 0.125)),
    ]


def test_a_large_shape_of_a_range_runs_once_a_round_and_has_no_percentile(made_up: list[tuple[str, int, int]]) -> None:
    engine: Any = TimedRunner("a", [[8.0], [5.0], [4.0]])
    (found,) = best_of_rounds([Timed(engine, {}, False)])
    assert made_up == [("a", 0, 1)] * 3
    assert found == Measured(4.0, None, Noise(3, (6.5 - 4.5) / 5.0, 1.25, 0.125))


def test_a_small_shape_of_a_range_has_a_percentile_where_a_round_has_runs_enough(
    made_up: list[tuple[str, int, int]],
) -> None:
    engine: Any = TimedRunner("a", [[3.0] * 9, [2.0] * 9 + [6.0] * 9, [1.0] * 19 + [3.0] * 2])
    (found,) = best_of_rounds([Timed(engine, {}, False)])
    assert (found.p50_ms, found.p95_ms, found.noise.runs) == (1.0, 3.0, 48)


def test_a_range_is_measured_at_its_ends_and_powers_of_two() -> None:
    assert measured_shapes(Bucket(4, 32)) == [Bucket(4, 32)]
    shapes = [(shape.batch, shape.sequence) for shape in measured_shapes(Bucket(8, 20, 1, 5))]
    assert shapes == [(1, 5), (1, 8), (1, 16), (1, 20), (8, 5), (8, 8), (8, 16), (8, 20)]


def test_few_whole_engines_are_open_at_once_and_segments_by_their_buckets(manifest: Manifest) -> None:
    whole = [replace(manifest.engines[0], id=f"e{i}", file=f"e{i}.b1-s8.onnx") for i in range(6)]
    twin = replace(whole[0], id="twin")  # of the same file
    segments = [
        replace(
            whole[0],
            id=f"{name}@{bucket.label}",
            file=f"{name}.{bucket.label}.onnx",
            kind=Segment(part=name),
            bucket=bucket,
        )
        for bucket in (Bucket(1, 8), Bucket(2, 8))
        for name in ("to2", "to4")
    ]
    groups = [[engine.id for engine in group] for group in measured_together([*whole, twin, *segments])]
    assert groups == [
        ["twin", "e1", "e2", "e3"],
        ["e4", "e5"],
        ["to2@b1-s8", "to2@b2-s8"],
        ["to4@b1-s8", "to4@b2-s8"],
    ]


GOLDEN = Path(__file__).parents[3] / "golden"
ENGINES = ["ffn16@b1-s8", "ffn16@b2-s16", "ffn32@b1-s8", "ffn32@b2-s16"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Short rounds on a host that is as busy as the list says: before, and then while engines are timed."""
    busy: list[float | None] = [0.0, 0.0]

    class Load:
        def share(self) -> float | None:
            return busy[1]

    monkeypatch.setattr(measuring, "others_now", lambda _: busy[0])
    monkeypatch.setattr(measuring, "OthersLoad", Load)
    monkeypatch.setattr(measuring, "_ROUND_SECONDS", 0.0)
    return busy


def silent(*_: Any) -> None:
    pass


def test_every_engine_is_measured_as_the_runtime_holds_it(bundle: Bundle) -> None:
    seen: list[tuple[str, int, int]] = []
    found = measure_bundle(bundle, lambda *each: seen.append(each), threads=1)
    assert seen == [("measure", 0, 1), ("measure", 1, 1)]
    assert (found.measurement.host, found.measurement.threads, found.left_out) == (this_host(), 1, {})
    assert [each.engine for each in found.measurement.engines] == ENGINES
    for each in found.measurement.engines:
        (point,) = each.points
        assert each.residency == "packed"
        assert 0 < point.p50_ms <= (point.p95_ms or 0)
        assert point.noise.runs == 30
        assert point.noise.repeat_ratio is not None
        assert point.noise.others_share == 0.0
    assert found.measurement.created.endswith("+00:00")


def test_a_cap_decides_residencies_and_names_what_it_leaves_out(bundle: Bundle) -> None:
    found = measure_bundle(bundle, silent, threads=1, memory_mb=0.0363)
    assert {each.residency for each in found.measurement.engines} == {"shared"}
    found = measure_bundle(bundle, silent, threads=1, memory_mb=0.03)
    assert found.left_out == {"ffn32@b2-s16": "no memory"}
    with pytest.raises(SelectionError, match="memory_mb"):
        measure_bundle(bundle, silent, threads=1, memory_mb=1e-6)


@pytest.mark.parametrize(("before", "meanwhile"), [(0.83, 0.0), (0.0, 0.83), (None, 0.83)])
def test_a_busy_host_is_refused_unless_forced(
    bundle: Bundle, quick: list[float | None], before: float | None, meanwhile: float
) -> None:
    quick[:] = [before, meanwhile]
    with pytest.raises(MeasurementError) as error:
        measure_bundle(bundle, silent, threads=1)
    assert str(error.value) == (
        "this host: other programs use 83% of the CPUs, expected at most 20%, so that a measurement would say little; "
        "nothing was saved. Wait until they are done, or measure with `force=True`, which marks figures as noisy"
    )
    forced = measure_bundle(bundle, silent, threads=1, force=True).measurement
    assert {point.noise.others_share for each in forced.engines for point in each.points} == {meanwhile}


def test_where_the_system_does_not_say_how_busy_it_is_engines_are_measured(
    bundle: Bundle, quick: list[float | None]
) -> None:
    quick[:] = [None, None]
    found = measure_bundle(bundle, silent, threads=1)
    assert {point.noise.others_share for each in found.measurement.engines for point in each.points} == {None}


def test_engines_that_tasks_are_merged_into_are_measured_too() -> None:
    bundle = open_bundle(GOLDEN / "bundle-merged")
    found = measure_bundle(bundle, silent, threads=1)
    assert [each.engine for each in found.measurement.engines] == [one.id for one in bundle.manifest.timed_engines]
    assert {each.residency for each in found.measurement.engines} == {"packed"}
