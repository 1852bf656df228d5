import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import nestforge
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.errors import BundleError, SelectionError
from nestforge.ownership import Owner
from nestforge.profiles.probe_host import probe_host
from nestforge.runtime.in_flight import InFlight, LoadEstimate

MS = st.floats(0.01, 100)


class Clock:
    """Seconds that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_ms(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3


def entered(book: InFlight, expected_ms: float) -> Owner:
    """A request that is in flight as long as what is returned."""
    request = Owner()
    book.enter(request, expected_ms)
    return request


def simulate(remaining: list[float], own: float, parallel_runs: float, step: float) -> float:
    """The finish of ``own`` by small steps of time."""
    left, passed = [*remaining, own], 0.0
    while left[-1] > 0:
        running = [i for i, ms in enumerate(left) if ms > 0]
        for i in running:
            left[i] -= step * min(1.0, parallel_runs / len(running))
        passed += step
    return passed


@pytest.mark.parametrize(("parallel_runs", "alone"), [(runs, [runs == 2] * 3 + [True]) for runs in (1.0, 4 / 3, 2.0)])
def test_says_which_requests_had_their_share_of_the_cores_to_themselves(
    parallel_runs: float, alone: list[bool]
) -> None:
    book = InFlight(parallel_runs)
    first = entered(book, 1.0)
    second = entered(book, 1.0)
    found = [book.leave(second)]
    third = entered(book, 1.0)
    found += [book.leave(first), book.leave(third)]
    assert [*found, book.leave(entered(book, 1.0))] == alone


@given(remaining=st.lists(st.floats(0, 20), max_size=4), parallel_runs=st.floats(1, 3), own=st.floats(0.5, 20))
def test_a_finish_is_what_small_steps_of_time_come_to(remaining: list[float], parallel_runs: float, own: float) -> None:
    load = LoadEstimate(sorted(remaining), parallel_runs)
    assert load.finish_ms(own) == pytest.approx(simulate(remaining, own, parallel_runs, 0.01), abs=0.1)


@given(remaining=st.lists(st.floats(0, 100), max_size=6), parallel_runs=st.floats(1, 4), own=MS, more=MS)
def test_room_is_the_inverse_and_both_rise(
    remaining: list[float], parallel_runs: float, own: float, more: float
) -> None:
    load = LoadEstimate(sorted(remaining), parallel_runs)
    assert load.room_ms(load.finish_ms(own)) == pytest.approx(own)
    assert load.finish_ms(own + more) > load.finish_ms(own)
    # No sooner than alone, but for rounding, and no later than one after the other.
    assert own - 1e-6 <= load.finish_ms(own) <= own + sum(remaining) + 1e-6


@pytest.mark.parametrize("left", [0.0, -3.0])
def test_no_time_left_is_no_room(left: float) -> None:
    assert LoadEstimate([], 1).room_ms(left) == left
    assert LoadEstimate([1.0], 1).room_ms(left) <= 0


def test_a_run_of_which_nothing_is_known_may_stay_to_the_end() -> None:
    assert LoadEstimate([math.inf], 1).finish_ms(5) == 10
    assert LoadEstimate([math.inf], 1).room_ms(10) == 5


def test_the_book_follows_time_entries_and_departures() -> None:
    clock = Clock()
    book = InFlight(1, clock)
    first = entered(book, 10)
    clock.pass_ms(4)
    assert book.load().remaining_ms == pytest.approx([6])
    second = entered(book, 2)
    clock.pass_ms(2)  # half speed
    assert book.load().remaining_ms == pytest.approx([1, 5])
    book.leave(second)
    clock.pass_ms(6)
    assert book.load().remaining_ms == [0]  # late
    book.leave(first)
    assert book.load().remaining_ms == []


def test_lanes_let_runs_proceed_side_by_side() -> None:
    clock = Clock()
    book = InFlight(2, clock)
    requests = [entered(book, 10) for _ in range(3)]
    clock.pass_ms(3)
    assert book.load().remaining_ms == pytest.approx([8, 8, 8])
    assert len(requests) == 3


def test_an_admitted_request_is_in_flight_for_the_next() -> None:
    clock = Clock()
    book = InFlight(1, clock)
    seen: list[str] = []

    def choose(load: LoadEstimate) -> tuple[str, float]:
        seen.append(str(load))
        return "chosen", 4.0

    first, second = Owner(), Owner()
    chosen = book.admit(first, math.inf, choose)
    book.admit(second, math.inf, choose)
    third = entered(book, math.inf)
    seen.append(str(book.load()))
    assert chosen == "chosen"
    assert seen == [
        "nothing in flight",
        "1 in flight that needs 4 ms more",
        "3 in flight that need unknown time more",
    ]
    for request in (second, first, third):
        book.leave(request)
    assert str(book.load()) == "nothing in flight"


def test_a_choice_that_fails_enters_nothing() -> None:
    book = InFlight(1)

    def fail(_: LoadEstimate) -> tuple[str, float]:
        raise KeyError("no")

    with pytest.raises(KeyError):
        book.admit(Owner(), math.inf, fail)
    assert book.load().remaining_ms == []


def test_many_threads_never_take_the_same_room() -> None:
    book = InFlight(1, Clock())
    start = threading.Barrier(8)

    requests = [Owner() for _ in range(8)]

    def take(request: Owner) -> bool:
        start.wait(10)

        def choose(load: LoadEstimate) -> tuple[bool, float]:
            fits = load.room_ms(10) >= 5
            return fits, 5.0 if fits else 0.0

        return book.admit(request, math.inf, choose)

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, requests))
    assert sum(taken) == 2


def test_a_request_whose_call_was_interrupted_is_in_flight_no_more() -> None:
    clock = Clock()
    book = InFlight(1, clock)
    over, collected, left = entered(book, 10), entered(book, 10), entered(book, 10)
    clock.pass_ms(3)
    assert book.load().remaining_ms == pytest.approx([9, 9, 9])
    over.is_over = True
    del collected
    clock.pass_ms(4)
    assert book.load().remaining_ms == pytest.approx([5]), "the cores are the last one's from then on"
    book.leave(left)
    assert book.load().remaining_ms == []


@pytest.mark.parametrize(
    ("remaining", "left", "room"),
    [
        ([9], [12], 3),  # 3 ms more are what it can wait
        ([9], [18], 91),  # it keeps its deadline beside any
        ([9], [8], 91),  # it keeps its deadline beside none
        ([9], [math.inf], 91),
        ([2, 9], [math.inf, 12], 1),  # it ends after 11 ms
        ([2, 9], [4.5, 20], 0.5),  # the first one ends after 4 ms
    ],
)
def test_a_run_leaves_others_their_deadlines(remaining: list[float], left: list[float], room: float) -> None:
    assert LoadEstimate(remaining, 1, left).room_ms(100) == pytest.approx(room)


@given(
    requests=st.lists(st.tuples(st.floats(0.1, 20), st.floats(0.1, 90)), min_size=1, max_size=4),
    parallel_runs=st.floats(1, 3),
)
def test_whoever_was_in_time_is_so_beside_the_longest_run(
    requests: list[tuple[float, float]], parallel_runs: float
) -> None:
    requests = sorted(requests)
    remaining, left = [ms for ms, _ in requests], [ms for _, ms in requests]
    room = LoadEstimate(remaining, parallel_runs, left).room_ms(100)
    for place, (own, due) in enumerate(requests):
        others = remaining[:place] + remaining[place + 1 :]
        if LoadEstimate(others, parallel_runs).finish_ms(own) <= due:
            assert LoadEstimate(sorted([*others, room]), parallel_runs).finish_ms(own) <= due + 1e-6


def admitted(book: InFlight, due_ms: float, own_ms: float = 4.0) -> Owner:
    """A request of ``own_ms`` that is due at a time of the book's clock."""
    request = Owner()
    book.admit(request, due_ms / 1e3, lambda _: ("chosen", own_ms))
    return request


def test_late_requests_leave_a_run_a_smaller_share_of_its_deadline() -> None:
    clock = Clock()
    book = InFlight(1, clock)
    assert book.load().share == 1.0
    late = admitted(book, 5)
    clock.pass_ms(6)
    book.leave(late)
    assert book.load().share == pytest.approx(0.8)
    first, second = admitted(book, 100), admitted(book, 100)
    for request in (first, second):
        book.leave(request)
    assert book.load().share == pytest.approx(0.8 * 1.01**2), "in time beside another"
    book.leave(admitted(book, 100))
    assert book.load().share == pytest.approx(0.8 * 1.01**2 * 1.05), "in time alone"
    book.leave(entered(book, 4.0))
    assert book.load().share == pytest.approx(0.8 * 1.01**2 * 1.05), "a request without a deadline says nothing"


@pytest.mark.parametrize(("fits_alone", "share"), [(True, 0.8), (False, 1.0)])
def test_a_request_that_is_refused_for_others_counts_as_late(fits_alone: bool, share: float) -> None:
    book = InFlight(1, Clock())
    other = admitted(book, math.inf)

    def choose(load: LoadEstimate) -> tuple[str, float]:
        if load.remaining_ms or not fits_alone:
            raise SelectionError(str(load))
        return "chosen", 4.0

    with pytest.raises(SelectionError, match=r"^1 in flight that needs 4 ms more$"):
        book.admit(Owner(), 1.0, choose)
    assert book.load().share == share
    book.leave(other)


def test_runs_beside_others_are_expected_to_take_as_long_as_they_did() -> None:
    clock = Clock()
    book = InFlight(1, clock)
    for _ in range(200):
        first, second = entered(book, 4.0), entered(book, 4.0)
        clock.pass_ms(16)  # each would have had its 4 ms after 8
        book.leave(first)
        book.leave(second)
    load = book.load()
    assert load.stretch == pytest.approx(2, rel=0.01)
    assert (load.room_ms(10), load.finish_ms(5)) == (10, 5), "alone it takes what it takes"
    other = entered(book, 4.0)
    assert book.load().remaining_ms == pytest.approx([8], rel=0.01)
    assert book.load().room_ms(16) == pytest.approx(4, rel=0.01)
    book.leave(other)


@pytest.mark.parametrize("expected_ms", [0.0, math.inf])
def test_runs_without_a_figure_say_nothing_of_others(expected_ms: float) -> None:
    clock = Clock()
    book = InFlight(1, clock)
    first, second = entered(book, 4.0), entered(book, expected_ms)
    clock.pass_ms(16)
    book.leave(first)
    stretch = book.load().stretch
    clock.pass_ms(16)
    assert (book.leave(second), book.load().stretch) == (False, stretch)


def test_a_run_that_does_not_count_changes_no_expectation() -> None:
    clock = Clock()
    book = InFlight(1, clock)
    first, second = entered(book, 4.0), entered(book, 4.0)
    clock.pass_ms(16)
    assert [book.leave(one, counts=False) for one in (first, second)] == [False, False]
    assert book.load().stretch == 1.0


Feeds = Callable[..., dict[str, Any]]


def test_a_request_that_fails_is_no_longer_in_flight(tiny_bundle: Path, feeds: Feeds) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        for options in ({"exits": 0.3}, {"deadline_ms": 1e-9}, {"submodel": "none"}):
            with pytest.raises(SelectionError):
                model(feeds(1, 8), **options)
    with pytest.raises(BundleError, match="the model is closed"):
        model(feeds(1, 8))
    assert model._in_flight.load().remaining_ms == []


def test_many_deadlines_at_once_and_a_close_leave_nothing_in_flight(tiny_bundle: Path, feeds: Feeds) -> None:
    model = nestforge.load(tiny_bundle, threads=1, preload=True)
    begun = threading.Event()

    def ask(seed: int) -> str:
        try:
            answer = model(feeds(1, 8, seed=seed), deadline_ms=(1e-9, 3, 1e3)[seed % 3])
        except (SelectionError, BundleError) as failure:
            return type(failure).__name__
        begun.set()
        return answer.submodel

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, seed) for seed in range(400)]
        assert begun.wait(10)
        model.close()
        found = {each.result(10) for each in asked}
    assert found <= {"ffn16", "ffn32", "SelectionError", "BundleError"}
    assert {"SelectionError"} < found
    assert model._in_flight.load().remaining_ms == []


def test_a_first_run_beside_others_does_not_say_how_long_later_ones_take(
    tiny_bundle: Path, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nestforge.load(tiny_bundle, threads=probe_host().cores) as model:
        monkeypatch.setattr(model._in_flight, "_clock", count().__next__)  # a second passes at every look
        other = Owner()
        model._in_flight.enter(other, 1e6)
        found = [(model(feeds(1, 8)).first_run, model._in_flight.load().stretch > 1.0) for _ in range(2)]
        assert found == [(True, False), (False, True)]


@pytest.mark.parametrize("deadline_ms", [np.float32(1e5), np.int64(10**5)])
def test_others_leave_a_deadline_its_time_whatever_kind_of_number_it_is(
    tiny_bundle: Path, feeds: Feeds, deadline_ms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nestforge.load(tiny_bundle, threads=1) as model:
        left: list[float] = []
        monkeypatch.setattr(model._inputs, "check_values", lambda _: left.extend(model._in_flight.load().left_ms))
        model(feeds(1, 8), deadline_ms=deadline_ms)
    assert 0 < left[0] <= 1e5


def test_a_deadline_beyond_all_floats_is_refused(tiny_bundle: Path, feeds: Feeds) -> None:
    refused = pytest.raises(SelectionError, match=r"^deadline_ms: expected a positive number, got inf$")
    with nestforge.load(tiny_bundle, threads=1) as model, refused:
        model(feeds(1, 8), deadline_ms=10**400)
