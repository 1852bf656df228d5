"""The queue alone, over a real dispatcher's figures: time is a number that tests move."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nestforge.bucket import Bucket
from nestforge.errors import NestforgeError, OverloadError
from nestforge.runtime.request import Request
from nestforge.serving.scheduler import Job, Run, Scheduler
from support.latencies import latency
from support.small_bundle import make_manifest
from support.three_submodels import SIZES, dispatcher, make

# small, medium and large take 1, 2 and 4 ms for one row of 32 steps and twice that for up to four, 4 to 16 of 128.
MANIFEST = make(make_manifest(), SIZES, (Bucket(1, 32), Bucket(1, 128), Bucket(4, 32)))
FACTORS = {"b1-s32": 1, "b4-s32": 2, "b1-s128": 4}
DISPATCHER = dispatcher(
    MANIFEST, [latency(e.id, float(SIZES[e.submodel] * FACTORS[e.bucket.label])) for e in MANIFEST.engines]
)
TIMED, UNTIMED = Request(deadline_ms=1.0), Request()


@lru_cache
def options(key: Any, rows: int, steps: int) -> Any:
    try:
        return DISPATCHER.candidates(key, rows, steps)
    except NestforgeError:
        return ()


def job(arrived: float, deadline: float | None, client: str = "a", rows: int = 1, steps: int = 32, **own: Any) -> Job:
    """A request with a deadline, or one that states nothing and waits for 1000 ms at most."""
    key = UNTIMED if deadline is None else TIMED
    due, timed = arrived + (deadline or 1000.0), deadline is not None
    fields = {"key": key, "alone": options(key, rows, steps), "timed": timed, **own}
    return Job(rows=rows, steps=steps, client=client, arrived=arrived, due=due, **fields)


def queue(**settings: Any) -> Scheduler:
    return Scheduler(options, **settings)


def started(scheduler: Scheduler, now: float) -> Run:
    run = scheduler.start(now)
    assert run is not None
    return run


@pytest.mark.parametrize(("deadline", "submodel"), [(4.0, "large"), (3.9, "medium"), (1.9, "small"), (None, "large")])
def test_the_largest_in_time_answers(deadline: float | None, submodel: str) -> None:
    scheduler = queue()
    scheduler.submit(job(10.0, deadline), 10.0)
    run = started(scheduler, 10.0)
    assert run.candidate.engine.submodel == submodel
    assert scheduler.start(10.0) is None
    assert (scheduler.waiting, scheduler.running) == (0, 1)
    scheduler.end(run, 12.0)
    assert (scheduler.waiting, scheduler.running) == (0, 0)


def test_what_waits_makes_the_run_before_it_smaller_and_the_reason_says_so() -> None:
    scheduler = queue()
    scheduler.submit(job(0.0, 8.0, key=None), 0.0)
    scheduler.submit(job(0.0, 3.5, key=None), 0.0)
    run = started(scheduler, 0.0)
    assert [each.due for each in run.jobs] == [3.5]
    assert run.candidate.engine.submodel == "medium"
    assert run.reason.startswith(
        "predicted 2 ms (p95 2 ms) <= 3.5 ms left of 3.5, 2 waiting, 0 running; next larger la"
    )
    scheduler.end(run, 2.0)
    assert started(scheduler, 2.0).candidate.engine.submodel == "large"


def test_smaller_submodels_answer_before_any_request_is_refused() -> None:
    scheduler, answered = queue(), []
    for _ in range(5):
        scheduler.submit(job(0.0, 5.0, key=None), 0.0)
    with pytest.raises(OverloadError) as refusal:
        scheduler.submit(job(0.0, 5.0, key=None), 0.0)
    assert str(refusal.value) == (
        "no submodel answers 1x32 within 5 ms: 5 waiting and 0 running before it, it would need 6 ms; allow more time, "
        "or ask again later"
    )
    assert refusal.value.needs_ms == 6.0
    for now in range(5):
        run = started(scheduler, float(now))
        answered.append(run.candidate.engine.submodel)
        scheduler.end(run, now + 1.0)
    assert answered == ["small"] * 5


def test_a_refusal_states_what_was_given_and_counts_from_the_arrival() -> None:
    with pytest.raises(OverloadError, match=r"within 0.01 ms: 0 waiting and 0 running .* would need 4 ms") as refusal:
        queue().submit(job(0.0, 0.01), 3.0)
    assert refusal.value.needs_ms == 1.0


def test_a_new_job_may_not_make_an_admitted_one_late() -> None:
    scheduler = queue()
    scheduler.submit(job(0.0, 4.0, steps=128), 0.0)
    with pytest.raises(OverloadError, match=r"within 1 ms: 1 waiting .* it would need 5 ms"):
        scheduler.submit(job(0.0, 1.0, key=None), 0.0)
    assert scheduler.waiting == 1


def test_jobs_of_a_key_share_a_run_where_that_takes_no_longer() -> None:
    scheduler = queue()
    each = [job(0.0, 100.0) for _ in range(6)]
    for one in each:
        scheduler.submit(one, 0.0)
    run = started(scheduler, 0.0)
    assert run.jobs == tuple(each[:4])
    assert run.candidate.engine.id == "large@b4-s32"
    scheduler.end(run, 8.0)
    assert started(scheduler, 8.0).jobs == tuple(each[4:])


def test_jobs_that_differ_in_their_key_or_do_not_gain_run_alone() -> None:
    scheduler = queue()
    first, other = job(0.0, 100.0), job(0.0, None)
    long, alone = job(0.0, 100.0, steps=128), job(0.0, 100.0, key=None)
    for one in (first, alone, long, other):
        scheduler.submit(one, 0.0)
    runs, now = [], 0.0
    while run := scheduler.start(now):
        runs.append(run.jobs)
        now += run.candidate.p95_ms
        scheduler.end(run, now)
    assert sorted(map(len, runs)) == [1] * 4


def test_a_run_is_not_shared_where_the_first_job_would_be_late_for_it() -> None:
    scheduler = queue()
    for deadline in (4.0, 60.0):
        scheduler.submit(job(0.0, deadline), 0.0)
    run = started(scheduler, 0.0)
    assert (len(run.jobs), run.candidate.engine.submodel) == (1, "large")


def test_more_rows_than_an_engine_takes_run_alone() -> None:
    scheduler = queue()
    for rows in (6, 1):
        scheduler.submit(job(0.0, None, rows=rows), 0.0)
    run = started(scheduler, 0.0)
    assert run.candidate.runs is not None
    assert [one.rows for one in run.jobs] == [6]


def test_two_workers_run_two_jobs() -> None:
    scheduler = queue(cores=2)
    for _ in range(3):
        scheduler.submit(job(0.0, 4.0, key=None), 0.0)
    runs = [started(scheduler, 0.0), started(scheduler, 0.0)]
    assert scheduler.start(0.0) is None
    assert [run.candidate.engine.submodel for run in runs] == ["medium", "medium"], "the third is in time behind one"


WIDE_MS, NARROW_MS = {1: 3.0, 2: 5.0, 4: 9.0}, {1: 4.0, 2: 6.0, 4: 10.0}


def forms(key: Any, rows: int, _: int) -> Any:
    """One engine on both cores, and on one, where it takes somewhat longer."""
    (large,) = options(UNTIMED, 1, 32)
    kinds = ((WIDE_MS, 2),) if key == "wide" else ((WIDE_MS, 2), (NARROW_MS, 1))
    return [replace(large, p95_ms=times[rows], cores=cores) for times, cores in kinds if rows in times]


def waiting(count: int) -> Scheduler:
    scheduler = Scheduler(forms, cores=2)
    for _ in range(count):
        scheduler.submit(job(0.0, None, key="a", alone=forms("a", 1, 32)), 0.0)
    return scheduler


def begun(scheduler: Scheduler, now: float = 0.0) -> list[tuple[int, int]]:
    """Jobs and cores of each run that starts now."""
    runs = iter(lambda: scheduler.start(now), None)
    return [(len(run.jobs), run.candidate.cores) for run in runs]


def test_alone_a_run_has_all_cores_and_where_many_wait_runs_go_side_by_side() -> None:
    assert begun(waiting(1)) == [(1, 2)]
    assert begun(waiting(2)) == [(1, 1), (1, 1)]
    assert begun(waiting(3)) == [(2, 1), (1, 1)]
    assert begun(waiting(4)) == [(2, 1), (2, 1)]


def test_a_run_on_fewer_cores_is_for_those_that_are_in_time_so() -> None:
    scheduler = Scheduler(forms, cores=2)
    for deadline in (3.5, 20.0):
        scheduler.submit(job(0.0, deadline, key="a", alone=forms("a", 1, 32)), 0.0)
    assert begun(scheduler) == [(1, 2)]
    assert scheduler.idle == 0


def test_who_needs_all_cores_waits_for_them_and_none_overtakes_it() -> None:
    scheduler = waiting(2)
    runs = [started(scheduler, 0.0), started(scheduler, 0.0)]
    scheduler.submit(job(0.0, None, key="wide", alone=forms("wide", 1, 32)), 0.0)
    scheduler.submit(job(0.0, None, key="a", alone=forms("a", 1, 32)), 0.0)
    scheduler.end(runs[0], 5.0)
    assert scheduler.idle == 1
    assert begun(scheduler, 5.0) == []
    scheduler.end(runs[1], 6.0)
    assert begun(scheduler, 6.0) == [(1, 2)]


def test_who_comes_first_leaves_time_for_the_same_submodel_behind() -> None:
    scheduler, found = queue(), []
    for _ in range(2):
        scheduler.submit(job(0.0, 5.0, key=None), 0.0)
    for now in (0.0, 2.0):
        run = started(scheduler, now)
        found.append(run.candidate.engine.submodel)
        scheduler.end(run, now + 2.0)
    assert found == ["medium", "medium"], "large and small would be in time too"


def test_what_others_wait_for_runs_before_deadlines_behind_it() -> None:
    scheduler = queue()
    for number in range(6):
        scheduler.submit(job(0.0, 8.0, str(number), key=None), 0.0)
    for within in (7.0, 9.0):
        scheduler.submit(job(0.0, None, "0", key=None, continues=True, within=within), 0.0)
    dues = []
    for now in range(8):
        run = started(scheduler, float(now))
        dues.append(run.jobs[0].due)
        scheduler.end(run, now + 1.0)
    assert dues == [1000.0, *[8.0] * 6, 1000.0]


def test_who_floods_stands_behind_who_does_not() -> None:
    scheduler = queue()
    for _ in range(20):
        scheduler.submit(job(0.0, None, "flood", key=None), 0.0)
    scheduler.submit(job(1.0, None, "other", key=None), 1.0)
    clients = []
    for now in range(3):
        run = started(scheduler, 1.0 + now)
        clients.append(run.jobs[0].client)
        scheduler.end(run, 2.0 + now)
    assert clients == ["flood", "other", "flood"]


def test_each_client_has_its_share_of_the_queue() -> None:
    scheduler = queue()
    for client, most in (("flood", 10), ("other", 0)):
        taken = 0
        for _ in range(30):
            try:
                scheduler.submit(job(0.0, 10.0, client, key=None), 0.0)
                taken += 1
            except OverloadError:
                pass
        assert taken == most
    now = 0.0
    for _ in range(5):  # the flood asks for each place that is free, and leaves half of them to the other
        run = started(scheduler, now)
        now += 1.0
        scheduler.end(run, now)
        with pytest.raises(OverloadError):
            scheduler.submit(job(now, 10.0, "flood", key=None), now)
        scheduler.submit(job(now, 10.0, "other", key=None), now)
    assert scheduler.waiting == 10


def test_a_client_that_asks_no_more_leaves_its_share_to_others() -> None:
    scheduler = queue()
    scheduler.submit(job(0.0, 10.0, "other"), 0.0)
    scheduler.end(started(scheduler, 0.0), 1.0)
    later = 20_000.0
    for _ in range(10):
        scheduler.submit(job(later, 10.0, "flood", key=None), later)
    assert scheduler.waiting == 10


def test_a_full_queue_refuses() -> None:
    scheduler = queue(most_waiting=2)
    for _ in range(2):
        scheduler.submit(job(0.0, None), 0.0)
    with pytest.raises(OverloadError):
        scheduler.submit(job(0.0, None), 0.0)


def test_a_job_whose_client_is_gone_does_not_run() -> None:
    scheduler = queue()
    gone, stays = job(0.0, 50.0, key=None), job(0.0, 60.0, key=None)
    scheduler.submit(gone, 0.0)
    scheduler.submit(stays, 0.0)
    scheduler.cancel(gone)
    run = started(scheduler, 0.0)
    assert run.jobs == (stays,)
    scheduler.cancel(stays)
    scheduler.end(run, 1.0)


def test_late_answers_plan_with_less_of_a_deadline_and_what_is_too_late_waits_no_more() -> None:
    scheduler = queue()
    scheduler.submit(job(0.0, 10.0), 0.0)
    scheduler.end(started(scheduler, 0.0), 11.0)
    assert scheduler.share == pytest.approx(0.9)
    scheduler.submit(job(20.0, 4.1), 20.0)
    run = started(scheduler, 20.0)
    assert run.candidate.engine.submodel == "medium", "4 ms are more than 0.9 of 4.1"
    late = job(20.0, 4.0)
    scheduler.submit(late, 20.0)
    assert scheduler.expired(23.9) == []
    assert scheduler.expired(24.0) == [late]
    scheduler.end(run, 24.05)
    assert scheduler.share == pytest.approx(0.9 * 1.00015 * 1.00015)
    assert scheduler.start(24.1) is None


def test_a_late_run_of_several_jobs_counts_once() -> None:
    scheduler = queue()
    for _ in range(4):
        scheduler.submit(job(0.0, 10.0), 0.0)
    run = started(scheduler, 0.0)
    assert len(run.jobs) == 4
    scheduler.end(run, 11.0)
    assert scheduler.share == pytest.approx(0.9)


def test_jobs_that_are_late_by_plan_share_a_run_all_the_same() -> None:
    scheduler = queue()
    scheduler.submit(job(0.0, 20.0, key=None, steps=128), 0.0)
    busy = started(scheduler, 0.0)
    for _ in range(4):
        scheduler.submit(job(0.0, 30.0), 0.0)
    scheduler.end(busy, 28.5)
    run = started(scheduler, 28.5)
    assert (len(run.jobs), run.candidate.engine.submodel) == (4, "small")


def test_the_time_to_send_answers_is_planned_with() -> None:
    scheduler = queue()
    for _ in range(200):
        scheduler.sent(0.5)  # whose deviations from the mean die out
    scheduler.submit(job(0.0, 4.4), 0.0)
    assert started(scheduler, 0.0).candidate.engine.submodel == "medium", "4 ms and 0.5 are more than 4.4"
    with pytest.raises(OverloadError, match=r"it would need 3\.5 ms"):
        scheduler.submit(job(0.0, 3.4), 0.0)


def test_while_jobs_are_refused_the_smallest_answers_and_five_deadlines_later_the_largest_again() -> None:
    scheduler = queue()
    scheduler.submit(job(0.0, 4.0, key=None), 0.0)
    busy = started(scheduler, 0.0)
    with pytest.raises(OverloadError):
        scheduler.submit(job(0.0, 4.0, key=None), 0.0)
    scheduler.end(busy, 4.0)
    for now, submodel in ((20.0, "small"), (20.1, "large")):
        scheduler.submit(job(now, 4.0, key=None), now)
        run = started(scheduler, now)
        assert run.candidate.engine.submodel == submodel
        assert ("not while others are refused" in run.reason) == (submodel == "small")
        scheduler.end(run, now + 0.05)


def test_late_answers_do_not_keep_an_idle_queue_from_taking_jobs() -> None:
    scheduler = queue()
    for _ in range(30):  # as a busy host makes them
        scheduler.submit(job(0.0, 4.0), 0.0)
        scheduler.end(started(scheduler, 0.0), 9.0)
    assert scheduler.share == pytest.approx(0.3)
    for now in range(20):  # 0.3 of 3 ms are less than the 1 ms of the smallest
        scheduler.submit(job(10.0 * now, 3.0), 10.0 * now)
        scheduler.end(started(scheduler, 10.0 * now), 10.0 * now + 1.0)


def test_time_to_send_that_was_long_once_is_forgotten_by_refusals() -> None:
    scheduler = queue()
    for _ in range(100):
        scheduler.sent(20.0)
    scheduler.submit(job(0.0, 4.0), 0.0)  # the one that is tried
    scheduler.end(started(scheduler, 0.0), 1.0)
    for now in range(1, 190):  # 3 ms of 20 are left of it after 189
        with pytest.raises(OverloadError):
            scheduler.submit(job(float(now), 4.0), float(now))
    scheduler.submit(job(190.0, 4.0), 190.0)


def test_an_idle_queue_tries_what_figures_refuse_once_a_second() -> None:
    scheduler = queue()
    scheduler.submit(job(0.0, 0.2), 0.0)
    scheduler.end(started(scheduler, 0.0), 0.1)
    with pytest.raises(OverloadError, match="it would need 1 ms"):
        scheduler.submit(job(500.0, 0.2), 500.0)
    scheduler.submit(job(1000.0, 0.2), 1000.0)
    scheduler.end(started(scheduler, 1000.0), 1001.0)
    with pytest.raises(OverloadError):
        scheduler.submit(job(3000.0, 0.09), 3000.0)  # more than ten times as long


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0, 3),  # since the one before
        st.one_of(st.none(), st.floats(1.5, 40)),
        st.sampled_from("abc"),
        st.integers(1, 3),
        st.sampled_from([8, 32, 100]),
        st.booleans(),
    ),
    max_size=40,
)


def played(
    arrivals: Any, workers: int, took: Callable[[float], float]
) -> tuple[list[tuple[Job, float, str]], list[Job], list[Job]]:
    """Jobs with the time at which each was answered and by whom, those whose deadline passed before, and all that were
    admitted; a run takes ``took(p95)``."""
    scheduler, now = queue(cores=workers), 0.0
    coming = []
    for gap, deadline, client, rows, steps, shares in arrivals:
        now += gap
        coming.append((now, deadline, client, rows if steps <= 32 else 1, steps, shares))
    running: list[tuple[float, Run]] = []
    done: list[tuple[Job, float, str]] = []
    late: list[Job] = []
    admitted: list[Job] = []
    while coming or running or scheduler.waiting:
        ends = min((end for end, _ in running), default=float("inf"))
        if coming and coming[0][0] < ends:
            now, deadline, client, rows, steps, shares = coming.pop(0)
            one = job(now, deadline, client, rows, steps, **({} if shares else {"key": None}))
            if min(each.p95_ms for each in one.alone) > one.due - now:
                continue  # which an idle queue would try
            with suppress(OverloadError):
                scheduler.submit(one, now)
                admitted.append(one)
        else:
            now = ends
            for end, run in [each for each in running if each[0] == now]:
                running.remove((end, run))
                scheduler.end(run, now)
                done += [(each, now, run.candidate.engine.submodel) for each in run.jobs]
        late += scheduler.expired(now)
        while run := scheduler.start(now):
            assert len({each.key for each in run.jobs}) == 1
            assert run.candidate.engine.bucket.batch >= sum(each.rows for each in run.jobs)
            assert len(running) < workers
            running.append((now + took(run.candidate.p95_ms), run))
        assert len(running) == workers or not scheduler.waiting, "nothing waits beside an idle worker"
    return done, late, admitted


@given(arrivals=ARRIVALS, workers=st.integers(1, 3))
def test_whoever_is_admitted_is_in_time_where_runs_take_what_is_stated(arrivals: Any, workers: int) -> None:
    done, late, admitted = played(arrivals, workers, lambda stated: stated)
    assert not late
    assert all(end <= one.due for one, end, _ in done)
    assert sorted(id(one) for one, *_ in done) == sorted(map(id, admitted))


@given(arrivals=ARRIVALS, workers=st.integers(1, 3))
def test_every_admitted_job_ends_whatever_runs_take(arrivals: Any, workers: int) -> None:
    done, late, admitted = played(arrivals, workers, lambda stated: 3 * stated)
    assert sorted(map(id, [*(one for one, *_ in done), *late])) == sorted(map(id, admitted))


def test_at_three_times_what_the_largest_sustains_most_are_in_time_and_not_all_by_the_smallest() -> None:
    """Poisson arrivals, with deadlines of four times the largest's; runs differ, and one of a hundred is slow."""
    draw = random.Random(0)
    arrivals = [(draw.expovariate(3 / 4), 16.0, "a", 1, 32, True) for _ in range(4000)]
    done, _, admitted = played(
        arrivals, 1, lambda stated: stated * draw.uniform(0.7, 1.0) * (2.5 if draw.random() < 0.01 else 1.0)
    )
    assert len(admitted) / len(arrivals) > 0.97
    assert sum(end <= one.due for one, end, _ in done) / len(admitted) > 0.99
    by = Counter(submodel for *_, submodel in done)
    assert by["small"] < 0.2 * len(done) < by["large"], by


def test_what_continues_is_taken_however_late_and_runs_by_its_own_time() -> None:
    scheduler = queue(most_waiting=2)
    scheduler.submit(job(0.0, 8.0, key=None), 0.0)
    scheduler.submit(job(0.0, 8.0, key=None), 0.0)
    step = job(0.0, 0.5, "b", key=None, continues=True)
    scheduler.submit(step, 0.0)
    assert scheduler.expired(1.0) == []
    run = started(scheduler, 1.0)
    assert (run.jobs, run.candidate.engine.submodel) == ((step,), "small")
    scheduler.end(run, 2.0)
    assert scheduler.share == 1.0, "a step that is late says nothing of deadlines"


def test_deadlines_that_no_load_explains_change_nothing_for_others() -> None:
    scheduler = queue()
    for number in range(20):
        now = 1000.0 * number
        with suppress(OverloadError):
            scheduler.submit(job(now, 0.2), now)
        if run := scheduler.start(now):
            scheduler.end(run, now + 1.0)
        with pytest.raises(OverloadError):
            scheduler.submit(job(now + 2.0, 0.2), now + 2.0)
    assert scheduler.share == 1.0
    scheduler.submit(job(20_000.0, 4.0, "other"), 20_000.0)
    assert started(scheduler, 20_000.0).candidate.engine.submodel == "large"


def test_one_slow_answer_does_not_refuse_those_behind_it() -> None:
    scheduler = queue()
    scheduler.sent(1000.0)
    scheduler.submit(job(0.0, 6.0), 0.0)
    assert started(scheduler, 0.0).candidate.engine.submodel == "large"


def test_a_deadline_without_end_gives_no_larger_share() -> None:
    scheduler = queue()
    second = [replace(one, p95_ms=1000.0) for one in options(TIMED, 1, 32)]
    scheduler.submit(job(0.0, 60_000.0, "other", key=None, alone=second), 0.0)
    for _ in range(15):
        scheduler.submit(job(0.0, 1e9, "flood", key=None, alone=second), 0.0)
    with pytest.raises(OverloadError):
        scheduler.submit(job(0.0, 1e9, "flood", key=None, alone=second), 0.0)


@lru_cache
def chain_options(segment: int, rows: int, _: int) -> Any:
    """Three segments of 3 ms each, of up to four rows."""
    taken = [one for one in options(UNTIMED, rows, 32) if one.runs is None]
    return [replace(one, p95_ms=9.0 - 3.0 * segment) for one in taken]


def on_its_way(now: float, segment: int, within: float = 9.0) -> Job:
    """What is left of a request of a chain before a segment, which is the key."""
    after = tuple(range(segment))
    alone = chain_options(segment, 1, 32)
    return job(now, None, key=segment, alone=alone, continues=True, within=within, after=after)


def new(now: float) -> Job:
    return job(now, None, key=0, alone=chain_options(0, 1, 32))


def test_a_job_on_its_way_waits_for_those_that_come_to_where_it_stands_and_goes_on_with_them() -> None:
    scheduler, stopped, first = Scheduler(chain_options), on_its_way(0.0, 1), new(0.0)
    scheduler.submit(stopped, 0.0)
    scheduler.submit(first, 0.0)
    run = started(scheduler, 0.0)
    assert run.jobs == (first,)
    come = on_its_way(3.0, 1)
    assert run.stops(come, 3.0)
    scheduler.end(run, 3.0)
    scheduler.submit(come, 3.0)
    run = started(scheduler, 3.0)
    assert set(run.jobs) == {stopped, come}
    assert not run.stops(on_its_way(6.0, 2), 6.0)


def test_a_job_on_its_way_goes_on_in_its_time_in_a_full_run_near_its_end_and_before_jobs_of_others() -> None:
    others = job(0.0, 500.0, key=None)
    for first, between in (
        ([on_its_way(0.0, 1, 2.9)], []),
        ([on_its_way(0.0, 1) for _ in range(4)], []),
        ([on_its_way(0.0, 2)], []),  # alone it takes less than one would to come there
        ([on_its_way(0.0, 1)], [others]),
    ):
        scheduler = Scheduler(chain_options)
        for one in (*first, *between, new(0.0)):
            scheduler.submit(one, 0.0)
        assert started(scheduler, 0.0).jobs == tuple(first)


def test_a_run_stops_for_those_that_may_come_to_where_it_is() -> None:
    scheduler = Scheduler(chain_options)
    scheduler.submit(new(0.0), 0.0)
    run = started(scheduler, 0.0)
    scheduler.submit(job(0.5, 900.0, key=None), 0.5)
    assert not run.stops(on_its_way(3.0, 1), 3.0), "of others"
    scheduler.submit(new(2.0), 2.0)
    assert not run.stops(on_its_way(3.0, 1), 3.0), "behind one of others"
    scheduler = Scheduler(chain_options)
    scheduler.submit(new(2.0), 2.0)
    assert scheduler.stops(on_its_way(3.0, 1), 3.0)
    assert not scheduler.stops(on_its_way(3.0, 2), 3.0), "near its end"


@given(st.lists(st.tuples(st.floats(0, 6), st.integers(0, 2)), min_size=1, max_size=40))
def test_few_are_on_their_way_and_none_waits_for_longer_than_it_may(arrivals: list[tuple[float, int]]) -> None:
    """Each passes so many exits, behind which its run stops where it is told to."""
    scheduler, now, coming, passes = Scheduler(chain_options), 0.0, [], {}
    for gap, exits in arrivals:
        now += gap
        coming.append(new(now))
        passes[coming[-1]] = exits
    now, limits, left = 0.0, dict[Job, float](), len(coming)
    while left:
        while coming and coming[0].arrived <= now:
            scheduler.submit(coming.pop(0), now)
        run = scheduler.start(now)
        if run is None:
            now = coming[0].arrived
            continue
        for one in run.jobs:
            # A run that has begun may be in its way, and one before each segment.
            assert now <= limits.pop(one, now) + 9.0
        segment, going = int(str(run.jobs[0].key)), list(run.jobs)
        while going:
            segment, now = segment + 1, now + 3.0
            going = [one for one in going if passes[one] >= segment]
            if going and run.stops(replace(on_its_way(now, segment), rows=len(going)), now):
                break
        scheduler.end(run, now)
        left -= len(run.jobs) - len(going)
        for one in going:
            further = on_its_way(now, segment)
            passes[further], limits[further] = passes[one], now + 9.0
            scheduler.submit(further, now)
        assert len(limits) <= 2 * 4, "a full run goes on"
