"""The desk between an event loop and its threads: what is answered while a run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Event

import pytest
from nestforge.bucket import Bucket
from nestforge.bundle.build_record import Latency
from nestforge.errors import OverloadError
from nestforge.runtime.request import Request
from nestforge.serving.desk import Desk
from nestforge.serving.scheduler import Job, Run
from nestforge.serving.served import now_ms
from support.small_bundle import make_manifest
from support.three_submodels import SIZES, dispatcher, make

MANIFEST = make(make_manifest(), SIZES, (Bucket(1, 32),))
ONE_MS = dispatcher(MANIFEST, [Latency(engine.id, 1.0) for engine in MANIFEST.engines]).candidates(Request(), 1, 32)


class Held:
    """Runs that go on until they are let go."""

    def __init__(self) -> None:
        self.end, self.seen = Event(), []  # type: ignore[var-annotated]

    def replies(self, works: Sequence[str], run: Run, /) -> Sequence[str]:
        self.seen += works
        assert self.end.wait(60)
        return works


def job(ms: float) -> Job:
    return Job(None, 1, 32, "a", now_ms(), now_ms() + ms, ONE_MS, timed=True)


def test_a_deadline_that_passes_is_heard_of_while_a_run_goes_on_and_who_is_gone_never_runs() -> None:
    async def ask() -> None:
        desk, held = Desk(1, 512), Held()
        first = desk.answer(held, "first", job(60_000))
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
