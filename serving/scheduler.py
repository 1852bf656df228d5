"""Which waiting job runs next, with which others and by which submodel, and which are refused at once.

Pure: it has no clock, no thread and no socket. Time is an argument, in milliseconds from any start; what a run takes
comes from the dispatcher (``Candidate.p95_ms``). The rules, with their reasons, are in docs/decisions/0056.
"""

from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from typing import Any, NamedTuple

from ..errors import OverloadError
from ..runtime.candidates import Candidate, next_larger

# Factors of the part of a deadline that is planned with: after a run with a late answer, and after one without.
# Some 0.15 % of misses keep it where it is: clients see more, as answers have a way to go.
_MISSED, _KEPT, _LEAST_SHARE = 0.9, 1.00015, 0.3
# Part of a new time to send an answer in the mean of them, and deviations above the mean that are planned with.
_NEW, _DEVIATIONS = 0.1, 2.0
# The most beyond twice the planned time to send that one counts for.
_MS_ODD = 5.0
# A deadline beyond counts as this where a client's part of the time to it is its share.
_MS_SHARED = 30_000.0
# For how long after its last job a client has its share of the queue, and how many clients are known at most.
_MS_ACTIVE, _MOST_CLIENTS = 10_000.0, 4096
# Where nothing else runs, figures refuse only what they put this far off, or what was tried within so long.
_MOST_WRONG, _MS_TRIED = 10.0, 1000.0
# For how many of its deadlines after a refusal a job gets the submodel that takes least: the time that a larger one
# takes is what the next job is refused for.
_DEADLINES_SMALL = 5.0
# Share of the time to send that a refusal leaves: else one that was long once would refuse for ever.
_UNLEARNT = 0.99
# Jobs in a row that do not fit a run before no more are looked at.
_MISFITS = 4
# Beside its engines, what a run costs that stops on its way, and begins again.
_MS_STOP = 1.2
# A run takes what it is stated to take, or a little less than two of them.
_ROUNDING = 1e-6

# The engines that may answer so many rows of so many steps together, of jobs of a key.
Options = Callable[[Hashable, int, int], Sequence[Candidate]]


@dataclass(eq=False, frozen=True)
class Job:
    """Rows of one request, answered together: ``rows`` of at most ``steps``. Jobs of equal keys may share a run; one
    whose key is None runs alone. It came at ``arrived`` and is ``due`` (milliseconds); ``timed`` is one whose request
    stated that. ``alone`` are the engines that may answer it, the largest submodel first, one where its request leaves
    no choice. One that ``continues`` what was admitted is never refused, late or not. One that others wait for has its
    place as if it were due ``within`` so many milliseconds. Jobs with a key of ``after`` may come to where it stands,
    and then share its runs."""

    key: Hashable
    rows: int
    steps: int
    client: str
    arrived: float
    due: float
    alone: Sequence[Candidate]
    timed: bool = False
    continues: bool = False
    within: float | None = None
    after: tuple[Hashable, ...] = ()

    @cached_property
    def least(self) -> Sequence[Candidate]:
        """Who takes least on each number of cores."""
        return [
            _fastest(one for one in self.alone if one.cores == cores) for cores in {one.cores for one in self.alone}
        ]

    def of(self, submodel: str | None) -> Sequence[Candidate]:
        """The engines of ``submodel``, or for None those that take least."""
        return self.least if submodel is None else [one for one in self.alone if one.engine.submodel == submodel]


@dataclass(eq=False, frozen=True)
class Run:
    """Jobs that one run answers, by ``candidate``, and how it was chosen. Asked on its way with a job of what is left,
    by the time, it ``stops`` where further runs take that with others."""

    jobs: tuple[Job, ...]
    candidate: Candidate
    reason: str
    stops: Callable[[Job, float], bool] = lambda _job, _now: False


class Further(NamedTuple):
    """The result of a run that has not answered its request: a job that goes on with it, and its work."""

    job: Job
    work: Any


class _Waiting(NamedTuple):
    """``order``: by it jobs run, see ``submit``."""

    order: float
    number: int
    job: Job


_Queue = Sequence[_Waiting]


class Scheduler:
    """The queue before runs on ``cores``, of at most ``most_waiting`` jobs. ``overloads`` counts those that
    were refused, or expired, though alone they would have been in time. Not thread-safe."""

    def __init__(self, options: Options, cores: int = 1, most_waiting: int = 512) -> None:
        self._options, self._cores, self._most_waiting = options, cores, most_waiting
        self._known: dict[tuple[Hashable, int, int], Sequence[Candidate]] = {}  # options, since a call began
        self._waiting: list[_Waiting] = []
        self._running: dict[Run, float] = {}  # with the time at which each is expected to end
        self._seen: dict[str, float] = {}  # when each client last sent a job, in that order
        self._number = 0
        self._share = 1.0
        self._tried = -_MS_TRIED
        self._refused_at = -inf
        self.overloads = 0
        self._probe: Job | None = None  # which was tried last
        self._sending, self._deviation = 0.0, 0.0  # milliseconds, means

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> int:
        """How many cores no run has."""
        return self._cores - sum(self._cores_of(run.candidate) for run in self._running)

    @property
    def share(self) -> float:
        """The part of a deadline that is planned with, 0.3 to 1: late answers lower it."""
        return self._share

    def submit(self, job: Job, now: float) -> None:
        """Takes a job. Raises OverloadError where it would be late, or make another late, even if all that wait are
        answered by the submodels that take least; where its client has its share of the queue; or where that is full.

        Jobs run by their deadlines. One whose client has others waiting counts as sent when those would be done, so
        that it stands behind the jobs of clients that have none.
        """
        self._known.clear()
        behind = sum(self._takes(one.job) for one in self._waiting if one.job.client == job.client)
        own_place = now + (behind + job.due - job.arrived if job.within is None else job.within)
        last = max(own_place, self._waiting[-1].order) if self._waiting else own_place
        self._number += 1
        self._note(job.client, now)
        if job.continues or not self._has_its_share(job, behind, now):
            # Behind all others it makes none of them late.
            for order in dict.fromkeys((own_place, last)):
                entry = _Waiting(order, self._number, job)
                if job.continues or self._fits(entry, now):
                    insort(self._waiting, entry)
                    return
        if _fastest(job.alone).p95_ms <= job.due - job.arrived:  # else no load is why
            self._refused_at = now
            self.overloads += 1
        self._sending *= _UNLEARNT
        self._deviation *= _UNLEARNT
        needs_ms = self._ends([*self._waiting, _Waiting(last, self._number, job)], now)[-1][1] + self._to_send - now
        raise OverloadError(
            f"no submodel answers {job.rows}x{job.steps} within {job.due - job.arrived:.3g} ms: {self.waiting} "
            f"waiting and {self.running} running before it, it would need {now - job.arrived + needs_ms:.3g} ms; allow "
            "more time, or ask again later",
            needs_ms,
        )

    def cancel(self, job: Job) -> None:
        """Its client is gone: nothing happens where it runs already, or is done."""
        self._waiting = [entry for entry in self._waiting if entry.job is not job]

    def expired(self, now: float) -> list[Job]:
        """The waiting jobs whose deadline has passed, which wait no more."""
        late = [entry.job for entry in self._waiting if entry.job.due <= now and not entry.job.continues]
        if late:
            self._waiting = [entry for entry in self._waiting if entry.job not in late]
            self._weigh(late, now)
            self.overloads += len(late)
        return late

    def start(self, now: float) -> Run | None:
        """The run to start now; None where nothing waits, or the first job for a core that is not free.

        It is of the first job and of those behind it that share its key, as long as together they take no longer than
        one after the other and each free core has its part; a job on its way may give way to those that come to where
        it stands. The largest of its submodels answers with which all in the run are in time, and no more of those
        behind it late, if it answered them too, than with the one that takes least; that one while jobs are refused.
        """
        idle, free = self.idle, self._free(now)
        if not self._waiting or not idle:
            return None
        self._known.clear()
        queue = self._given_way(now)
        head = queue[0].job
        together, candidate = self._together(queue, free, None)
        reason = ""
        submodels = dict.fromkeys(one.engine.submodel for one in head.alone)
        if len(submodels) > 1:
            if not self._refused_lately(head, now):
                bar = self._late(_without(queue, together), now, self._after(candidate, free))
                for submodel in submodels:
                    jobs, one = self._together(queue, free, submodel)
                    ends = self._begins(one, free) + one.p95_ms
                    if all(ends <= self._planned(entry) for entry in jobs) and (
                        self._late(_without(queue, jobs), now, self._after(one, free), submodel) <= bar
                    ):
                        together, candidate = jobs, one
                        break
            reason = self._reason(head, candidate, now)
        if self._cores_of(candidate) > idle:
            return None
        run = Run(tuple(entry.job for entry in together), candidate, reason, self.stops)
        self._waiting = _without(self._waiting, together)
        self._running[run] = now + candidate.p95_ms
        return run

    def stops(self, job: Job, now: float) -> bool:
        """Whether ``job``, which is left of a run, should wait: for those that come to where it stands, or to go on
        with one that stands there. Asked on the thread of the run, while the queue may change."""
        queue = [_Waiting(now + (job.within or 0.0), 0, job), *self._waiting]
        return len(queue) > 1 and (
            len(self._together(queue, [now], None)[0]) > 1 or self._catching_up(queue, now) is not None
        )

    def end(self, run: Run, now: float) -> None:
        """The run has ended, or failed."""
        del self._running[run]
        self._weigh(run.jobs, now)

    def sent(self, ms: float) -> None:
        """An answer went out so long after its run: from now on a deadline is planned with so much less. An odd one, as
        where a client does not read, says little."""
        off = min(ms, 2 * self._to_send + _MS_ODD) - self._sending
        self._sending += _NEW * off
        self._deviation += _NEW * (abs(off) - self._deviation)

    def _engines(self, key: Hashable, rows: int, steps: int) -> Sequence[Candidate]:
        """The options, looked up once in a call."""
        found = self._known.get((key, rows, steps))
        if found is None:
            found = self._known[key, rows, steps] = self._options(key, rows, steps)
        return found

    def _given_way(self, now: float) -> _Queue:
        """The queue, with the first job that may come to where its head stands before it, if that gives way; and so on
        with that."""
        queue: _Queue = self._waiting
        while behind := self._catching_up(queue, now):
            queue = [behind, *_without(queue, [behind])]
        return queue

    def _catching_up(self, queue: _Queue, now: float) -> _Waiting | None:
        """Who the head of ``queue`` gives way to: the next one, if it comes to where the head stands while that may
        wait, and all that wait are answered sooner on average where one run then takes both. Jobs of others are never
        overtaken."""
        head = queue[0]
        behind = next((entry for entry in queue if entry.job.key != head.job.key), None)
        if behind is None or behind.job.key not in head.job.after:
            return None
        here, candidate = self._together(queue, [now], None)
        coming, whole = self._together([behind, *_without(queue, [behind])], [now], None)
        (rows, steps), (more, most) = _size(here), _size(coming)
        steps, comes_ms = max(steps, most), whole.p95_ms
        if rest := self._engines(head.job.key, more, most):
            comes_ms -= _fastest(rest).p95_ms
        while more > behind.job.rows and not self._engines(head.job.key, rows + more, steps):
            more -= 1  # some leave before
        rest, both = self._engines(head.job.key, more, most), self._engines(head.job.key, rows + more, steps)
        if not rest or not both:
            return None
        joined_ms = comes_ms + _MS_STOP + _fastest(both).p95_ms
        apart_ms = candidate.p95_ms + comes_ms + _fastest(rest).p95_ms
        others, _ = _size(queue)
        saved = (others - rows) * (apart_ms - joined_ms) - rows * (joined_ms - candidate.p95_ms)
        return behind if saved > 0.0 and now + comes_ms <= head.order else None

    def _has_its_share(self, job: Job, behind: float, now: float) -> bool:
        """Whether the client's jobs before this one, and this, take more of its time than clients may have each."""
        clients = sum(now - seen <= _MS_ACTIVE for seen in self._seen.values())
        takes, left = behind + self._takes(job), min(job.due - now, _MS_SHARED)
        return self.waiting >= self._most_waiting or (clients > 1 and behind > 0 and takes > left / clients)

    def _refused_lately(self, job: Job, now: float) -> bool:
        return now - self._refused_at <= _DEADLINES_SMALL * (job.due - job.arrived)

    def _fits(self, entry: _Waiting, now: float) -> bool:
        """Whether no more jobs are late with it than without it; where nothing else runs, whether its own run is in
        time, or is tried, see docs/requests.md."""
        queue = list(self._waiting)
        insort(queue, entry)
        late = self._late(queue, now)
        if not late or late <= self._late(self._waiting, now):
            return True
        if self._waiting or self._running:
            return False
        need, left = _fastest(entry.job.alone).p95_ms, entry.job.due - now
        if need + self._sending <= left:
            return True
        if now - self._tried >= _MS_TRIED and need <= _MOST_WRONG * left:
            self._tried, self._probe = now, entry.job
            return True
        return False

    def _late(self, entries: _Queue, now: float, free: Sequence[float] | None = None, by: str | None = None) -> int:
        """How many of ``entries`` end after their deadlines if what takes least answers them, or submodel ``by`` what
        it can, on cores that are ``free`` then."""
        if not entries:
            return 0
        return sum(end > self._planned(entry) for entry, end in self._ends(entries, now, free, by))

    def _ends(
        self, entries: _Queue, now: float, free: Sequence[float] | None = None, by: str | None = None
    ) -> list[tuple[_Waiting, float]]:
        """The time at which each of ``entries`` ends, as ``_late`` says."""
        free = self._free(now) if free is None else free
        found: list[tuple[_Waiting, float]] = []
        left = list(entries)
        while left:
            together, candidate = self._together(left, free, by)
            free, end = self._after(candidate, free), self._begins(candidate, free) + candidate.p95_ms
            found += [(entry, end) for entry in together]
            left = _without(left, together)
        return found

    def _free(self, now: float) -> list[float]:
        """The time at which each core is free, rising."""
        busy = [max(now, end) for run, end in self._running.items() for _ in range(self._cores_of(run.candidate))]
        return sorted([*busy, *[now] * (self._cores - len(busy))])

    def _cores_of(self, candidate: Candidate) -> int:
        return min(candidate.cores, self._cores)

    def _begins(self, candidate: Candidate, free: Sequence[float]) -> float:
        """When as many cores as it takes are ``free``."""
        return free[min(candidate.cores, len(free)) - 1]

    def _after(self, candidate: Candidate, free: Sequence[float]) -> list[float]:
        """When each core is free behind a run."""
        cores = self._cores_of(candidate)
        return sorted([*[self._begins(candidate, free) + candidate.p95_ms] * cores, *free[cores:]])

    def _takes(self, job: Job) -> float:
        """Milliseconds of all cores that it takes at least."""
        return min(one.p95_ms * self._cores_of(one) for one in job.least) / self._cores

    def _form(self, candidates: Sequence[Candidate], entries: _Queue, free: Sequence[float]) -> Candidate:
        """Which of ``candidates`` runs the first of ``entries``: of those in time the one by which all, were they
        alike, would be done first. That is the fastest alone; where many wait it may be one on fewer cores, beside
        others."""
        if len(candidates) == 1:
            return candidates[0]
        planned = self._planned(entries[0])
        ends = [self._begins(one, free) + one.p95_ms for one in candidates]
        in_time = [place for place, end in enumerate(ends) if end <= planned]
        if len(entries) > 1 and len(in_time) > 1:
            shared = {one.cores: self._shared(one.cores, entries, len(free)) for one in candidates}
            for place in in_time:
                one = candidates[place]
                runs, engines = shared[one.cores]
                joined = _of(engines, one.engine.submodel, one.cores) or one
                ends[place] += runs * joined.p95_ms - one.p95_ms
        return candidates[min(in_time or range(len(ends)), key=ends.__getitem__)]

    def _shared(self, cores: int, entries: _Queue, free: int) -> tuple[float, Sequence[Candidate]]:
        """How many runs on so many cores follow one another until all ``entries`` are done, were they alike, and the
        engines for each, none where no run is shared."""
        job = entries[0].job
        of_each = ceil(len(entries) / max(1, free // cores))
        together = of_each if job.key is not None else 1
        while together > 1:
            if engines := self._engines(job.key, together * job.rows, job.steps):
                return of_each / together, engines
            together = ceil(together / 2)
        return of_each, ()

    def _together(
        self, entries: _Queue, free: Sequence[float], submodel: str | None
    ) -> tuple[list[_Waiting], Candidate]:
        """The first of ``entries`` and those that go with it into one run on the first ``free`` cores, of ``submodel``
        or, for None, of what takes least."""
        head = entries[0]
        own = head.job.of(submodel)
        together, candidate = [head], self._form(own or head.job.alone, entries, free)
        if not own or candidate.runs is not None or head.job.key is None:
            return together, candidate
        start = self._begins(candidate, free)
        beside = max(1, sum(at <= start for at in free) // candidate.cores)
        rows, steps, misfits = head.job.rows, head.job.steps, 0
        due = self._limit(head, start + candidate.p95_ms)
        for entry in entries[1:]:
            if len(together) * beside >= len(entries):
                break
            job = entry.job
            if job.key != head.job.key:
                continue
            alone = _of(job.of(submodel), submodel, candidate.cores)
            most = max(steps, job.steps)
            joined = _of(self._engines(job.key, rows + job.rows, most), submodel, candidate.cores)
            if alone is None:
                continue
            soonest = min(due, self._limit(entry, start + alone.p95_ms))
            if (
                joined is not None
                and joined.runs is None
                and joined.p95_ms <= (candidate.p95_ms + alone.p95_ms) * (1 + _ROUNDING)
                and start + joined.p95_ms <= max(soonest, start + candidate.p95_ms)
            ):
                together.append(entry)
                candidate, rows, steps, due, misfits = joined, rows + job.rows, most, soonest, 0
            elif (misfits := misfits + 1) >= _MISFITS:
                break
        return together, candidate

    def _limit(self, entry: _Waiting, soonest: float) -> float:
        """The end that a shared run has to keep for it; none where it is late even alone, as sharing is what helps."""
        planned = self._planned(entry)
        return planned if soonest <= planned else inf

    def _planned(self, entry: _Waiting) -> float:
        """The time at which it is planned to end at the latest, ahead of its deadline where answers were late, and
        for the time to send it."""
        job = entry.job
        if not job.timed:
            return job.due
        return job.arrived + self._share * (job.due - job.arrived) - (0.0 if job.continues else self._to_send)

    @property
    def _to_send(self) -> float:
        return self._sending + _DEVIATIONS * self._deviation

    def _note(self, client: str, now: float) -> None:
        self._seen.pop(client, None)
        if len(self._seen) >= _MOST_CLIENTS:
            del self._seen[next(iter(self._seen))]
        self._seen[client] = now

    def _weigh(self, jobs: Sequence[Job], now: float) -> None:
        """Once for all jobs of a run, which are late together where their answers will be; not what was tried, which
        figures said is late."""
        timed = [job.due for job in jobs if job.timed and not job.continues and job is not self._probe]
        if timed:
            is_late = now + self._sending > min(timed)
            self._share = min(1.0, max(_LEAST_SHARE, self._share * (_MISSED if is_late else _KEPT)))

    def _reason(self, head: Job, candidate: Candidate, now: float) -> str:
        """As the dispatcher says why a deadline chose."""
        larger = next_larger(head.alone, candidate)
        waits = f"{self.waiting} waiting, {self.running} running"
        missed = f"; next larger {larger}" if larger else ""
        if larger and self._refused_lately(head, now):
            missed += ", not while others are refused"
        return (
            f"{candidate.latency} (p95 {candidate.p95_ms:.3g} ms) <= {head.due - now:.3g} ms left of "
            f"{head.due - head.arrived:.3g}, {waits}{missed}"
        )


def _fastest(candidates: Iterable[Candidate]) -> Candidate:
    return min(candidates, key=lambda one: one.p95_ms)


def _of(candidates: Sequence[Candidate], submodel: str | None, cores: int) -> Candidate | None:
    """The engine of ``submodel``, or of any, that takes least on so many cores; None where there is none."""
    own = [one for one in candidates if submodel in (None, one.engine.submodel) and one.cores == cores]
    return _fastest(own) if own else None


def _size(entries: Iterable[_Waiting]) -> tuple[int, int]:
    """Their rows together, and the most steps."""
    jobs = [entry.job for entry in entries]
    return sum(job.rows for job in jobs), max(job.steps for job in jobs)


def _without(entries: _Queue, together: _Queue) -> list[_Waiting]:
    gone = {entry.number for entry in together}
    return [entry for entry in entries if entry.number not in gone]
