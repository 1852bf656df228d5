"""The scheduler between an event loop and the threads that run engines: here are the clock and the threads."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from ..errors import OverloadError
from .scheduler import Further, Job, Run, Scheduler
from .served import now_ms, options

_Given = TypeVar("_Given", contravariant=True)
_Found = TypeVar("_Found", covariant=True)
T = TypeVar("T")
# Work of a millisecond or so is done at once; threads for what is larger, of which each may hold 600 bytes a letter.
_SMALL, _TEXTS = 1024, 2
# A run of no more milliseconds may be made on the event loop's own thread.
_SHORT_MS = 10.0


def own_part(most: int, clients: Iterable[str], client: str) -> int:
    """How many of ``most`` a client may have beside ``clients``: there is always a part left for one more."""
    return max(1, most // (len({client, *clients}) + 1))


class Answers(Protocol[_Given, _Found]):
    """Functions that make runs, each for the work of its jobs, on a thread of the desk's."""

    def replies(self, works: Sequence[_Given], run: Run, /) -> Sequence[_Found | Further]: ...


class Desk:
    """Answers requests by runs on ``cores``. Everything but the runs is done on one event loop.

    To a thread and back is two wakes, with cold caches more than all that a small request takes beside its run. So one
    for which nobody waits, where no other could run beside it, is made on the loop's thread: who comes meanwhile would
    wait for it there too. The next one is not before the loop has read and written what there was.
    """

    def __init__(self, cores: int, most_waiting: int) -> None:
        self.scheduler = Scheduler(options, cores, most_waiting)
        self._pool = ThreadPoolExecutor(cores, "nestforge-run")
        self._texts = ThreadPoolExecutor(_TEXTS, "nestforge-text")
        self._asked: dict[Job, tuple[Answers[Any, Any], Any, asyncio.Future[Any], asyncio.TimerHandle]] = {}
        self._held_since: float | None = None  # by a run on the loop's thread

    def arrived(self) -> float:
        """When what the loop is told of now came, at the earliest: while a run held the loop nothing was read."""
        return now_ms() if self._held_since is None else self._held_since

    def answer(self, served: Answers[_Given, _Found], work: _Given, job: Job) -> asyncio.Future[_Found]:
        """The answer to a request, which is taken: where it is cancelled it waits no more. It raises OverloadError
        where the deadline passes, or as a call of the model does. Raises OverloadError where it cannot be in time."""
        loop = asyncio.get_running_loop()
        self.scheduler.submit(job, now_ms())
        future: asyncio.Future[_Found] = loop.create_future()
        run = self.scheduler.start(now_ms()) if self._is_short(job) else None
        if run is not None and not self.scheduler.idle:
            self._run_here(loop, served, work, run, future)
            return future
        late = loop.call_later(max(0.0, job.due - now_ms()) / 1e3, self._start, loop)
        self._keep(job, served, work, future, late)
        if run is not None:
            self._begin(loop, run)
        self._start(loop)
        return future

    def _keep(
        self,
        job: Job,
        served: Answers[_Given, _Found],
        work: _Given,
        future: asyncio.Future[_Found],
        late: asyncio.TimerHandle,
    ) -> None:
        self._asked[job] = (served, work, future, late)
        future.add_done_callback(lambda done: self._forget(job, done.cancelled()))

    def _is_short(self, job: Job) -> bool:
        """Whether the run of ``job``, which came last, may be made here. A step of what goes on never is: it would be
        followed by the next."""
        scheduler = self.scheduler
        if job.continues or self._held_since is not None or scheduler.waiting > 1 or scheduler.running:
            return False
        return all(0.0 < one.p95_ms <= _SHORT_MS for one in job.alone)  # 0: nothing is known of it

    def _run_here(
        self,
        loop: asyncio.AbstractEventLoop,
        served: Answers[_Given, _Found],
        work: _Given,
        run: Run,
        future: asyncio.Future[_Found],
    ) -> None:
        self._held_since = now_ms()
        try:
            (reply,) = served.replies([work], run)
            assert not isinstance(reply, Further)  # nothing that waits could share the rest
            future.set_result(reply)
        except Exception as failure:  # noqa: BLE001  (who asked hears of it)
            future.set_exception(failure)
        finally:
            self.scheduler.end(run, now_ms())
            loop.call_soon(loop.call_soon, self._let_go)  # when what came meanwhile has been read

    def _let_go(self) -> None:
        self._held_since = None

    def _forget(self, job: Job, is_cancelled: bool) -> None:
        if job not in self._asked:  # another goes on with it
            return
        self._asked.pop(job)[3].cancel()
        if is_cancelled:
            self.scheduler.cancel(job)

    async def aside(self, size: int, call: Callable[..., T], *given: Any) -> T:
        """``call`` of what is ``given``: on a thread of its own where it is of many letters, bytes or numbers, so that
        the event loop goes on."""
        if size <= _SMALL:
            return call(*given)
        return await asyncio.get_running_loop().run_in_executor(self._texts, call, *given)

    def close(self) -> None:
        """Begins no further run; those that run end."""
        for pool in (self._pool, self._texts):
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts what may run now."""
        now = now_ms()
        for job in self.scheduler.expired(now):
            waited = now - job.arrived
            self._settle(
                [job], OverloadError(f"deadline passed while it waited, {waited:.3g} ms; ask again later", 0.0)
            )
        while run := self.scheduler.start(now):
            self._begin(loop, run)

    def _begin(self, loop: asyncio.AbstractEventLoop, run: Run) -> None:
        served = self._asked[run.jobs[0]][0]
        done = self._pool.submit(served.replies, [self._asked[job][1] for job in run.jobs], run)
        done.add_done_callback(partial(self._ended, loop, run))

    def _ended(self, loop: asyncio.AbstractEventLoop, run: Run, done: Future[Sequence[Any]]) -> None:
        with suppress(RuntimeError):  # the server is over, and the loop closed
            loop.call_soon_threadsafe(self._end, loop, run, done)

    def _end(self, loop: asyncio.AbstractEventLoop, run: Run, done: Future[Sequence[Any]]) -> None:
        self.scheduler.end(run, now_ms())
        failure = done.exception()
        self._settle(run.jobs, failure if failure is not None else done.result())
        self._start(loop)

    def _settle(self, jobs: Sequence[Job], found: BaseException | Sequence[Any]) -> None:
        for number, job in enumerate(jobs):
            asked = self._asked.get(job)
            if asked is None or asked[2].done():  # its client is gone
                continue
            if isinstance(found, BaseException):
                asked[2].set_exception(found)
            elif isinstance(one := found[number], Further):
                del self._asked[job]
                self.scheduler.submit(one.job, now_ms())
                self._keep(one.job, asked[0], one.work, *asked[2:])
            else:
                asked[2].set_result(one)
