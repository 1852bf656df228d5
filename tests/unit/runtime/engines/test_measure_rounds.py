"""Engines timed in turns, and what the rounds say of each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import LatencyPoint, Noise
from nestforge.bundle.entries.engine_entry import Segment
from nestforge.bundle.manifest import Manifest
from nestforge.runtime.engines import measure as measuring
from nestforge.runtime.engines.measure import (
    Measured,
    Timed,
    best_of_rounds,
    measured_shapes,
    measured_together,
    with_measured,
)


class FakeRunner:
    """Has the times of its rounds, in milliseconds, behind a name."""

    def __init__(self, name: str, rounds: list[list[float]]) -> None:
        self.name, self.rounds = name, rounds

    def run(self, feeds: Any) -> None:
        raise AssertionError("never run")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Of each round in order: the engine's name, runs to warm up, and the least number of timed ones."""
    order: list[tuple[str, int, int]] = []

    def fake(call: Any, *, warmup: int, min_runs: int, **_: Any) -> list[float]:
        runner = call.func.__self__
        number = sum(name == runner.name for name, *_ in order)
        order.append((runner.name, warmup, min_runs))
        times: list[float] = runner.rounds[number]
        return times

    class Quiet:
        def share(self) -> float:
            return 0.125

    monkeypatch.setattr(measuring, "times_of", fake)
    monkeypatch.setattr(measuring, "OthersLoad", Quiet)
    return order


def test_the_best_round_counts_and_the_next_best_says_how_far(made_up: list[tuple[str, int, int]]) -> None:
    slow = [9.0] * 10
    engines: Any = [FakeRunner("a", [[2.0] * 10, slow, [2.5] * 10]), FakeRunner("b", [[4.0] * 20] * 3)]
    found = best_of_rounds([Timed(runner, {}, True) for runner in engines])
    assert made_up == [("a", 3, 10), ("b", 3, 10)] * 3, "in turns"
    assert found == [
        Measured(2.0, 2.0, Noise(30, (9.0 - 2.0) / 2.5, 1.25, 0.125)),
        Measured(4.0, 4.0, Noise(60, 0.0, 1.0, 0.125)),
    ]


def test_a_large_shape_of_a_range_runs_once_a_round_and_has_no_percentile(made_up: list[tuple[str, int, int]]) -> None:
    engine: Any = FakeRunner("a", [[8.0], [5.0], [4.0]])
    (found,) = best_of_rounds([Timed(engine, {}, False)])
    assert made_up == [("a", 0, 1)] * 3
    assert found == Measured(4.0, None, Noise(3, (6.5 - 4.5) / 5.0, 1.25, 0.125))


def test_a_small_shape_of_a_range_has_a_percentile_where_a_round_has_runs_enough(
    made_up: list[tuple[str, int, int]],
) -> None:
    engine: Any = FakeRunner("a", [[3.0] * 9, [2.0] * 9 + [6.0] * 9, [1.0] * 19 + [3.0] * 2])
    (found,) = best_of_rounds([Timed(engine, {}, False)])
    assert (found.p50_ms, found.p95_ms, found.noise.runs) == (1.0, 3.0, 48)


def test_a_range_is_measured_at_its_ends_and_powers_of_two() -> None:
    assert measured_shapes(Bucket(4, 32)) == [Bucket(4, 32)]
    shapes = [(shape.batch, shape.sequence) for shape in measured_shapes(Bucket(8, 20, 1, 5))]
    assert shapes == [(1, 5), (1, 8), (1, 16), (1, 20), (8, 5), (8, 8), (8, 16), (8, 20)]


def test_what_was_measured_stands_beside_the_prediction() -> None:
    noise = Noise(10, 0.1, 1.0, 0.0)
    point = with_measured(LatencyPoint(1, 8, 3.0), Measured(2.0, 2.5, noise))
    assert point == LatencyPoint(1, 8, 3.0, 2.0, 2.5, noise)


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
