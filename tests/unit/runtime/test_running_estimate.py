"""Times of engines while a model answers, followed on runs of made-up durations."""

import threading
from concurrent.futures import ThreadPoolExecutor
from math import exp
from time import perf_counter
from typing import Any

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import Noise
from nestforge.bundle.manifest import Manifest
from nestforge.errors import SelectionError
from nestforge.runtime.in_flight import LoadEstimate
from nestforge.runtime.request import Request
from nestforge.runtime.running_estimate import RunningEstimate
from support.latencies import latency
from support.three_submodels import BUCKETS, FAST, SIZES, dispatcher, make

AT = Bucket(1, 32)


class Counted:
    """An estimate and how often it requested new choices."""

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

    def work(_: int) -> None:
        start.wait(10)
        counted.runs([2.0] * 250)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert counted.ratio() == pytest.approx(2.0)
    assert counted.changes == 1


def test_choices_are_made_anew_where_the_estimate_begins_to_be_used(counted: Counted) -> None:
    counted.runs([exp(0.056)] * 60)
    before = counted.changes
    assert counted.ratio() == 1.0
    counted.runs([exp(0.105)] * 60)
    assert counted.ratio() == pytest.approx(exp(0.105), rel=0.01)
    assert counted.changes == before + 1


@pytest.fixture
def three(manifest: Manifest) -> Manifest:
    return make(manifest, SIZES, BUCKETS)


def runs(choose: Any, count: int, ratio: float, request: Request = FAST) -> list[str]:
    """``count`` requests of 1x8, each of which takes ``ratio`` times what is stated; the submodels that answered."""
    answered = []
    for _ in range(count):
        choice = choose(request, 1, 8)
        choice.ran(choice.stated_ms * ratio, 0.0)
        answered.append(choice.engine.submodel)
    return answered


def test_figures_that_are_five_times_too_large_correct_themselves(three: Manifest) -> None:
    """A factor of the smallest holds for the largest, which has not run: 4 ms are stated for it, and 0.8 are right."""
    chooser = dispatcher(three)
    answered = runs(chooser.choose, 6, 0.2)
    assert answered == ["small"] * 4 + ["large"] * 2, "the first run is not counted, three are enough"
    choice = chooser.choose(FAST, 1, 8)
    assert choice.reason == "predicted 4 ms, seen while running: 0.8 ms <= 1 ms"
    assert choice.latency_ms == pytest.approx(0.8)


def test_figures_that_are_five_times_too_small_correct_themselves(three: Manifest) -> None:
    chooser = dispatcher(three)
    request = Request(latency_ms=8)
    assert runs(chooser.choose, 6, 5.0, request) == ["large"] * 4 + ["small"] * 2
    assert chooser.choose(request, 1, 8).reason.startswith(
        "predicted 1 ms, seen while running: 5 ms <= 8 ms; next larger medium (predicted 2 ms, by what else ran here"
    )


def test_a_deadline_goes_by_what_was_seen_too(three: Manifest) -> None:
    known = [latency(f"{name}@b1-s32", size, size, 2.0 * size, "packed") for name, size in SIZES.items()]
    chooser = dispatcher(three, known)
    runs(chooser.choose, 5, 0.5, Request(submodel="large"))
    choice = chooser.choose_in_time(Request(deadline_ms=5), 1, 8, LoadEstimate([], 1))
    assert choice.reason.startswith(
        "measured here 4 ms, seen while running: 2 ms (p95 4 ms), expected in 4 ms <= 5 ms left of 5"
    )


def test_what_was_chosen_before_a_change_is_not_remembered_after_it(
    three: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = dispatcher(three)
    real = chooser._choose

    def slowly(request: Request, *shape: Any) -> Any:
        choice = real(request, *shape)
        chooser._forget()  # another thread's run
        return choice

    monkeypatch.setattr(chooser, "_choose", slowly)
    chooser.choose(FAST, 1, 8)
    assert chooser._remembered == {}


def test_noisy_figures_are_named_and_what_to_do_where_they_refuse(three: Manifest) -> None:
    noise = Noise(20, 0.4, 1.3, 0.5)
    known = [latency(f"{name}@b1-s32", size, size, size, "packed", noise=noise) for name, size in SIZES.items()]
    chooser = dispatcher(three, known)
    assert chooser.choose(Request(latency_ms=4), 1, 8).reason == "measured here 4 ms, noisy <= 4 ms"
    with pytest.raises(SelectionError) as refused:
        chooser.choose(Request(latency_ms=0.5), 1, 8)
    hint = "; noisy figures are not to be trusted: `nestforge measure BUNDLE` measures again"
    assert str(refused.value).endswith(f"small (measured here 1 ms, noisy, 11.0 MB){hint}")
    with pytest.raises(SelectionError) as late:
        chooser.choose_in_time(Request(deadline_ms=0.5), 1, 8, LoadEstimate([], 1))
    assert str(late.value).endswith(f"allow more time, or ask for it as `submodel`{hint}")


def test_what_a_refusal_rests_on_is_tried_until_it_was_seen(three: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = dispatcher(three)
    monkeypatch.setattr("nestforge.runtime.running_estimate.perf_counter", lambda: 100.0)
    for request in (Request(latency_ms=0.5), Request(deadline_ms=0.5), Request(latency_ms=0.5, memory_mb=12)):
        choice = chooser.to_try(request, 1, 8)
        assert choice.engine.submodel == "small"
        assert choice.reason == "tried, since no run has shown lately what it takes: predicted 1 ms"
    assert chooser.to_try(Request(latency_ms=0.5, memory_mb=5), 1, 8) is None, "nothing so small"
    assert chooser.to_try(Request(latency_ms=0.09), 1, 8) is None, "no figure is wrong by so much"
    assert chooser.to_try(Request(memory_mb=5), 1, 8) is None, "memory is not learnt"
    for _ in range(4):
        choice.ran(1.0, 100.0)
    assert chooser.to_try(Request(latency_ms=0.5), 1, 8) is None
    assert chooser.to_try(Request(latency_ms=0.5), 1, 100) is not None, "at another size"
    monkeypatch.setattr("nestforge.runtime.running_estimate.perf_counter", lambda: 101.1)
    assert chooser.to_try(Request(latency_ms=0.5), 1, 8) is not None, "a second later"
    assert dispatcher(three, []).to_try(Request(latency_ms=0.5), 1, 8) is None, "nothing known to compare with"


@pytest.mark.parametrize("request_", [Request(latency_ms=True), Request(latency_ms=1, budget="edge")])
def test_a_malformed_request_is_not_tried(three: Manifest, request_: Request) -> None:
    with pytest.raises(SelectionError):
        dispatcher(three).to_try(request_, 1, 8)
