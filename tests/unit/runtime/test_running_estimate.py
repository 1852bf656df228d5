"""What engines take while a model answers, followed on runs of made-up durations."""

from __future__ import annotations

import threading
from math import exp
from time import perf_counter

import pytest
from nestforge.bucket import Bucket
from nestforge.runtime.running_estimate import RunningEstimate

AT = Bucket(1, 32)


class Counted:
    """An estimate and how often it asked for new choices."""

    def __init__(self) -> None:
        self.changes = 0
        self.running = RunningEstimate(self.changed)

    def changed(self) -> None:
        self.changes += 1

    def runs(self, ratios: list[float], engine: str = "a", shape: Bucket = AT, stated_ms: float = 2.0) -> None:
        for ratio in ratios:
            self.running.of(engine, shape).add(stated_ms, stated_ms * ratio, perf_counter())

    def ratio(self, engine: str = "a", shape: Bucket = AT) -> float:
        return self.running.of(engine, shape).ratio


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_a_figure_stands_until_enough_runs_differ_from_it(counted: Counted) -> None:
    counted.runs([90.0], "a")  # the first run is not counted: it opened the engine
    counted.runs([0.2, 0.2])
    assert (counted.ratio(), counted.changes) == (1.0, 0)
    counted.runs([0.2])
    assert counted.ratio() == pytest.approx(0.2)
    assert counted.changes == 1


def test_a_figure_that_is_about_right_stands_as_it_is(counted: Counted) -> None:
    counted.runs([1.08, 0.95] * 20)
    assert counted.ratio() == 1.0


@pytest.mark.parametrize("wrong", [5.0, 0.2])
def test_what_one_engine_shows_holds_for_the_others_of_the_bundle(counted: Counted, wrong: float) -> None:
    counted.runs([wrong] * 4)
    other = counted.running.of("b", Bucket(4, 128))
    assert other.ratio == pytest.approx(wrong)
    assert (counted.running.of("a", AT).is_seen, other.is_seen) == (True, False)


def test_each_engine_is_refined_by_its_own_runs(counted: Counted) -> None:
    for _ in range(40):
        counted.runs([2.0], "a")
        counted.runs([6.0], "b")
    assert counted.ratio("a") == pytest.approx(2.0, rel=0.02)
    assert counted.ratio("b") == pytest.approx(6.0, rel=0.02)


def test_each_size_is_refined_by_its_own_runs(counted: Counted) -> None:
    for _ in range(60):
        counted.runs([2.0], shape=Bucket(1, 20))
        counted.runs([3.0], shape=Bucket(1, 300))
    assert counted.ratio(shape=Bucket(1, 31)) == pytest.approx(2.0, rel=0.02)
    assert counted.ratio(shape=Bucket(1, 256)) == pytest.approx(3.0, rel=0.02)


def test_an_odd_run_changes_little(counted: Counted) -> None:
    counted.runs([2.0] * 20)
    counted.runs([200.0])
    assert counted.ratio() < 2.6


@pytest.mark.parametrize(("before", "after"), [(1.0, 5.0), (5.0, 1.0), (1.0, 0.2)])
def test_a_host_that_changes_its_speed_is_followed_within_30_runs(
    counted: Counted, before: float, after: float
) -> None:
    counted.runs([before] * 100)
    counted.runs([after] * 30)
    assert counted.ratio() == pytest.approx(after, rel=0.1)


def test_a_host_that_becomes_quiet_is_noticed_for_engines_that_do_not_run(counted: Counted) -> None:
    """Else one that seems too slow would never be chosen again."""
    for _ in range(20):
        counted.runs([4.0], "large")
        counted.runs([4.0], "small")
    counted.runs([1.0] * 30, "small")
    assert counted.ratio("large") < 1.5


def test_choices_are_made_anew_only_for_a_change_that_counts(counted: Counted) -> None:
    counted.runs([3.0, 3.0, 3.0, 3.0])
    assert counted.changes == 1
    counted.runs([3.02, 2.98] * 50)
    assert counted.changes == 1


def test_a_size_is_fresh_for_a_second_after_enough_runs(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = counted.running.of("a", AT)
    for number in range(4):
        assert (estimate.is_new, estimate.is_fresh) == (number == 0, False)
        estimate.add(1.0, 1.0, 100.0)
    for now, fresh in ((100.9, True), (101.1, False)):
        monkeypatch.setattr("nestforge.runtime.running_estimate.perf_counter", lambda now=now: now)
        assert estimate.is_fresh is fresh
        assert not counted.running.of("a", Bucket(1, 128)).is_fresh


def test_threads_may_count_at_once(counted: Counted) -> None:
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(10)
        counted.runs([2.0] * 250)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted.ratio() == pytest.approx(2.0)
    assert counted.changes == 1


def test_choices_are_made_anew_where_the_estimate_begins_to_be_used(counted: Counted) -> None:
    counted.runs([exp(0.056)] * 60)
    before = counted.changes
    assert counted.ratio() == 1.0
    counted.runs([exp(0.105)] * 60)
    assert counted.ratio() == pytest.approx(exp(0.105), rel=0.01)
    assert counted.changes == before + 1
