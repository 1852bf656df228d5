"""The desk between an event loop and its threads: what is answered while a run goes on."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from threading import Event, current_thread

import pytest
from nestforge.bucket import Bucket
from nestforge.errors import InputError, OverloadError
from nestforge.runtime.candidates import Candidate
from nestforge.runtime.request import Request
from nestforge.serving.desk import Desk
from nestforge.serving.scheduler import Further, Job, Run
from nestforge.serving.served import now_ms
from support.latencies import latency
from support.small_bundle import make_manifest
from support.three_submodels import SIZES, dispatcher, make

MANIFEST = make(make_manifest(), SIZES, (Bucket(1, 32),))


def taking(ms: float) -> Sequence[Candidate]:
    """The engine of a request without a limit, whose run takes so long by its figures."""
    return dispatcher(MANIFEST, [latency(engine.id, ms) for engine in MANIFEST.engines]).candidates(Request(), 1, 32)


SHORT, LONG = taking(1.0), taking(100.0)


class Held:
    """Runs that go on until they are let go."""

    def __init__(self) -> None:
        self.end, self.seen = Event(), []

    def replies(self, works: Sequence[str], run: Run, /) -> Sequence[str]:
        self.seen += works
        assert self.end.wait(60)
        return works


class OnThreads:
    """Runs that say by which thread they were made."""

    def replies(self, works: Sequence[str], run: Run, /) -> Sequence[str]:
        if works == ["wrong"]:
            raise InputError("wrong")
        if works == ["interrupted"]:
            raise KeyboardInterrupt
        return [current_thread().name for _ in works]


def job(ms: float, takes: Sequence[Candidate] = SHORT, continues: bool = False) -> Job:
    return Job(None, 1, 32, "a", now_ms(), now_ms() + ms, takes, timed=True, continues=continues)


def test_a_deadline_that_passes_is_heard_of_while_a_run_goes_on_and_who_is_gone_never_runs() -> None:
    async def ask() -> None:
        desk, held = Desk(1, 512), Held()
        first = desk.answer(held, "first", job(60_000, continues=True))
        late, gone = desk.answer(held, "late", job(20)), desk.answer(held, "gone", job(60_000))
        with pytest.raises(OverloadError, match="deadline passed while it waited"):
            await late
        assert not first.done()
        gone.cancel()
        held.end.set()
        assert await first == "first"
        assert await desk.answer(held, "last", job(60_000)) == "last"
        assert held.seen == ["first", "last"]
        desk.close()

    asyncio.run(ask())


def test_a_short_run_for_which_nobody_waits_is_made_on_the_loops_thread_and_the_next_when_others_were_heard() -> None:
    async def ask() -> None:
        one, here, runs = Desk(1, 512), current_thread().name, OnThreads()
        before = now_ms()
        assert await one.answer(runs, "first", job(60_000)) == here
        held_since = one.arrived()
        assert before <= held_since < now_ms()
        assert (await one.answer(runs, "at once", job(60_000))).startswith("nestforge-run")
        await asyncio.sleep(0.01)
        assert one.arrived() > held_since
        with pytest.raises(InputError, match="wrong"):
            await one.answer(runs, "wrong", job(60_000))
        await asyncio.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            one.answer(runs, "interrupted", job(60_000))
        await asyncio.sleep(0.01)
        assert one.scheduler.running == 0
        unknown = [replace(SHORT[0], p95_ms=0.0), SHORT[0]]  # one of them may take any time
        for long in (job(60_000, LONG), job(60_000, unknown), job(60_000, continues=True)):
            assert (await one.answer(runs, "long", long)).startswith("nestforge-run")
        two = Desk(2, 512)  # another could run beside it
        assert (await two.answer(runs, "beside", job(60_000))).startswith("nestforge-run")
        alone = [replace(one, cores=2) for one in SHORT]
        assert await two.answer(runs, "alone", job(60_000, alone)) == here, "on all cores: none could"
        for desk in (one, two):
            desk.close()

    asyncio.run(ask())


class InTwo:
    """Runs of two halves, of which the second is a job that goes on."""

    def __init__(self) -> None:
        self.hold, self.seen = Event(), []

    def replies(self, works: Sequence[str], run: Run, /) -> Sequence[str | Further]:
        self.seen += works
        assert self.hold.wait(60)
        return [
            work if one.continues else Further(replace(one, continues=True), f"rest of {work}")
            for work, one in zip(works, run.jobs, strict=True)
        ]


def test_what_goes_on_is_answered_later_and_who_is_gone_goes_on_no_more() -> None:
    async def ask() -> None:
        desk, halves = Desk(1, 512), InTwo()
        gone, first = (desk.answer(halves, name, job(60_000, LONG)) for name in ("gone", "first"))
        while halves.seen != ["gone"]:
            await asyncio.sleep(0.001)
        gone.cancel()
        await asyncio.sleep(0)
        halves.hold.set()
        assert await first == "rest of first"
        assert halves.seen == ["gone", "first", "rest of first"]
        await asyncio.sleep(0)
        assert (desk.scheduler.waiting, desk.scheduler.running, desk._asked) == (0, 0, {})
        desk.close()

    asyncio.run(ask())


def test_what_is_large_is_done_beside_the_loop() -> None:
    async def ask() -> None:
        desk, end = Desk(1, 512), Event()
        large = asyncio.ensure_future(desk.aside(1 << 20, end.wait, 60))
        assert await desk.aside(10, int, "7") == 7
        assert not large.done()
        end.set()
        assert await large
        desk.close()

    asyncio.run(ask())
