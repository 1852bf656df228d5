"""Text that a bundle generates for many clients: one batch of rows for each choice of engines, whose steps are jobs of
the queue like any other, so that runs of other requests go between them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from ..bucket import Bucket
from ..bundle.entries.engine_entry import EngineEntry
from ..errors import InputError, OverloadError
from ..runtime.candidates import Candidate
from ..runtime.generation.batch import Batch
from ..runtime.generation.generator import Generator
from ..runtime.generation.options import GenerationRequest
from ..runtime.generation.row import Piece, Row
from ..runtime.running_estimate import RunningEstimate
from .desk import Desk, own_part
from .scheduler import Job, Run
from .served import Terms, now_ms

# Rows that step together, tokens of each with its prompt, batches of one bundle, each by engines of its own, and rows
# that wait for them beyond which no request is taken.
_MOST_ROWS, _MOST_TOKENS, _MOST_BATCHES, _MOST_WAITING = 8, 4096, 4, 256
# An engine, and what it is expected to take (ms), which steps correct themselves.
_Expected = tuple[EngineEntry, float]
_UNUSED = RunningEstimate(lambda: None).of("", Bucket(1, 1))
# A step, or a part of a prompt, runs within so many times what it takes, whatever else waits: others wait for it.
_SLOWER = 4.0


@dataclass(eq=False)
class Generation:
    """The rows of one request in the ``queue`` of their engines, which are chosen for ``reason``. The queue puts each
    token, or why there is none, into ``pieces``; ``moved`` is when it last did."""

    rows: Sequence[Row]
    terms: Terms
    queue: _Queue
    reason: str
    moved: float = -inf
    pieces: asyncio.Queue[tuple[Row, Piece | BaseException]] = field(default_factory=asyncio.Queue)

    @property
    def due(self) -> float:
        """When those of its rows are refused that wait: without a deadline they are patient while others go on."""
        return self.terms.due if self.terms.is_timed else max(self.terms.arrived, self.moved) + self.terms.patience_ms

    def put(self, row: Row, found: Piece | BaseException) -> None:
        self.moved = now_ms()
        self.pieces.put_nowait((row, found))

    async def each(self) -> AsyncIterator[tuple[Row, Piece]]:
        """Raises OverloadError where a row cannot be in time, or as a call of the model does."""
        left = len(self.rows)
        while left:
            row, found = await self.pieces.get()
            if isinstance(found, BaseException):
                raise found
            left -= found.finish is not None
            yield row, found

    def close(self) -> None:
        """Nothing more is wanted of it."""
        self.queue.leave(self)


class Generating:
    """The batches of one bundle, each by engines of its own. Everything but its runs is done on the event loop of
    ``desk``."""

    def __init__(self, generator: Generator, desk: Desk) -> None:
        self._generator, self._desk = generator, desk
        self._queues: dict[tuple[Any, ...], _Queue] = {}

    @property
    def rows(self) -> int:
        """How many read their prompt or step now."""
        return sum(queue.rows for queue in self._queues.values())

    async def begin(
        self, request: GenerationRequest, letters: int, choice: Mapping[str, Any], terms: Terms
    ) -> Generation:
        """Takes a request of so many ``letters`` with what it states of a submodel. Raises InputError for what does not
        fit, and OverloadError where there is no room for more texts, or for one more choice."""
        self._require_room(terms.client)
        stated = dict(choice) if terms.deadline_ms is None else {**choice, "deadline_ms": terms.deadline_ms}
        chosen = GenerationRequest(**stated)

        def read() -> tuple[Sequence[Row], Sequence[EngineEntry], str]:
            rows = self._generator.rows(request, _MOST_TOKENS)
            return rows, *self._generator.batch_engines(chosen, _MOST_ROWS, _MOST_TOKENS)

        rows, engines, reason = await self._desk.aside(letters, read)
        self._require_room(terms.client)
        generation = Generation(rows, terms, self._queue(chosen, engines, terms.client), reason)
        generation.queue.add(generation)
        return generation

    def _require_room(self, client: str) -> None:
        waiting = Counter(one.terms.client for queue in self._queues.values() for _, one in queue.waiting)
        if waiting.total() >= _MOST_WAITING or waiting[client] >= own_part(_MOST_WAITING, waiting, client):
            raise OverloadError(f"{waiting.total()} texts wait, {waiting[client]} of this client; ask again later", 1e3)

    def _queue(self, choice: GenerationRequest, engines: Sequence[EngineEntry], client: str) -> _Queue:
        """That of a task by these engines, with deadlines or without; where it is one too many, in the place of one
        that nobody uses. The last place is for a client that has none."""
        key = (choice.task, choice.is_timed, *(one.id for one in engines))
        queue = self._queues.pop(key, None)
        if queue is None or queue.is_broken:
            busy = [one for one in self._queues.values() if one.is_busy]
            if len(busy) + any(client in one.clients for one in busy) >= _MOST_BATCHES:
                raise OverloadError("submodels of other requests generate; ask again later", 1e3)
            if len(self._queues) >= _MOST_BATCHES:
                self._queues.pop(next(name for name, one in self._queues.items() if not one.is_busy)).close()
            queue = _Queue(self._generator, self._desk, choice)
        self._queues[key] = queue  # the last one used is the last
        return queue


class _Queue:
    """The rows of one choice: those that wait, and the batch of those that step, which ``_drive`` moves on."""

    def __init__(self, generator: Generator, desk: Desk, choice: GenerationRequest) -> None:
        self._generator, self._desk, self._choice = generator, desk, choice
        self.waiting: deque[tuple[Row, Generation]] = deque()
        self._of: dict[Row, Generation] = {}
        self._gone: list[Row] = []
        self._driver: asyncio.Task[None] | None = None
        self._batch: Batch | None = None
        self.is_broken = False

    @property
    def rows(self) -> int:
        return len(self._of)

    @property
    def clients(self) -> set[str]:
        """Whose rows step or wait."""
        return {one.terms.client for one in (*self._of.values(), *dict(self.waiting).values())}

    @property
    def is_busy(self) -> bool:
        return self._driver is not None

    def add(self, generation: Generation) -> None:
        self.waiting += [(row, generation) for row in generation.rows]
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())

    def leave(self, generation: Generation) -> None:
        """Its rows wait no more, and those in the batch leave it before the next step."""
        self.waiting = deque(each for each in self.waiting if each[1] is not generation)
        for row in generation.rows:
            if self._of.pop(row, None) is not None:
                self._gone.append(row)

    def close(self) -> None:
        if self._batch is not None:
            self._batch.close()

    def replies(
        self, works: Sequence[tuple[Row, str] | None], run: Run, /
    ) -> Sequence[list[tuple[Row, Piece | InputError]]]:
        """Result of a run: the first token of a row, whose engine was chosen for a reason, or for None one more of all
        that are there."""
        (work,), batch, engine = works, self._batch, run.candidate.engine
        assert batch is not None
        while self._gone:
            batch.leave(self._gone.pop())
        if work is None:
            return [batch.step(engine, run.reason) if batch.rows else []]
        row, reason = work
        try:
            piece = batch.join(row, engine, run.reason or reason)
        except InputError as failure:
            return [[(row, failure)]]
        return [[] if piece is None else [(row, piece)]]

    async def _drive(self) -> None:
        """A part of a prompt and a step in turn, while there are any."""
        try:
            if self._batch is None:
                self._batch = await asyncio.to_thread(self._generator.batch, self._choice, _MOST_ROWS, _MOST_TOKENS)
            joining: Any = None
            while self.waiting or self._of:
                if joining in self._of and joining not in self._batch.rows:
                    await self._read(self._batch, joining, self._of[joining])
                elif self.waiting and self._has_place(self._batch):
                    joining, generation = self._next()
                    self._of[joining] = generation
                    await self._read(self._batch, joining, generation)
                self._refuse_late()
                if rows := [row for row in self._batch.rows if row in self._of]:
                    await self._step(self._batch, rows)
        except Exception as failure:  # noqa: BLE001  (every client hears of it)
            self.is_broken = True
            for row, generation in [*self._of.items(), *self.waiting]:
                generation.put(row, failure)
            self._of.clear()
            self.waiting.clear()
        finally:
            self._driver = None
            if self.is_broken:
                self.close()

    def _has_place(self, batch: Batch) -> bool:
        """Whether one more may join. Where all places are taken and a client that waits has less than its share of
        them, a row of the one with the most makes place, which goes on later, unless it was promised to be in time."""
        if len(self._of) < batch.session.rows:
            return True
        rows = Counter(one.terms.client for one in self._of.values())
        share = max(1, batch.session.rows // len(self.clients))
        ((client, most),) = rows.most_common(1)
        is_fair = most <= share or all(rows[one.terms.client] >= share for _, one in self.waiting)
        own = [row for row in batch.rows if row in self._of and self._of[row].terms.client == client]
        if self._choice.is_timed or is_fair or not own:
            return False
        shortest = min(own, key=lambda row: len(row.tokens))  # all of it is read again
        self.waiting.appendleft((shortest, self._of.pop(shortest)))
        self._gone.append(shortest)
        return True

    def _next(self) -> tuple[Row, Generation]:
        """The first that waits, of the client with the fewest rows in the batch."""
        rows = Counter(generation.terms.client for generation in self._of.values())
        found = min(self.waiting, key=lambda each: rows[each[1].terms.client])
        self.waiting.remove(found)
        return found

    def _refuse_late(self) -> None:
        """Those that found no room in time; who made place for others waits until it has one again."""
        now = now_ms()
        for row, generation in [each for each in self.waiting if each[1].due <= now]:
            if self._choice.is_timed or not row.has_begun:
                self.waiting.remove((row, generation))
                waited = now - generation.terms.arrived
                failure = OverloadError(f"deadline passed while it waited, {waited:.3g} ms; ask again later", 0.0)
                generation.put(row, failure)

    async def _read(self, batch: Batch, row: Row, generation: Generation) -> None:
        """The next part of what a row has. Under a deadline it has its share of the time that is left to read in, and
        the first one is refused where the smallest submodel would be late with all that is asked for."""
        terms, engines = generation.terms, batch.to_read(row, batch.most_read)
        left_ms, steps_ms, part_ms = terms.patience_ms, 0.0, _least_ms(engines)
        is_asked = self._choice.is_timed and not row.prompt_ms
        if self._choice.is_timed:
            whole = batch.to_read(row)
            steps_ms = (row.tokens_left - 1) * _least_ms(batch.to_step(len(self._of)))
            left_ms = max(0.0, terms.due - now_ms() - steps_ms)
            if is_asked:
                engines = whole
            else:
                left_ms *= part_ms / max(_least_ms(whole), part_ms)
        job = self._job(generation, 1, row.prompt_tokens, engines, left_ms, part_ms)
        try:
            await self._run((row, generation.reason), replace(job, continues=not is_asked))
        except OverloadError as failure:
            needs_ms = failure.needs_ms + steps_ms
            failure = OverloadError(
                f"no submodel generates {row.tokens_left} tokens behind {row.prompt_tokens} within "
                f"{terms.due - terms.arrived:.3g} ms, it would need {needs_ms:.3g} ms; allow more time, ask for fewer "
                "tokens, or ask again later",
                needs_ms,
            )
            if self._of.pop(row, None) is not None:
                generation.put(row, failure)

    async def _step(self, batch: Batch, rows: Sequence[Row]) -> None:
        """One more token of ``rows``. Under deadlines it is due with what is left of the shortest."""
        first, now, engines = self._of[rows[0]], now_ms(), batch.to_step(len(rows))
        left_ms = first.terms.patience_ms
        if self._choice.is_timed:
            left_ms = max(0.0, min((self._of[row].terms.due - now) / max(1, row.tokens_left) for row in rows))
        await self._run(None, self._job(first, len(rows), 1, engines, left_ms, _least_ms(engines)))

    def _job(
        self, of: Generation, rows: int, steps: int, engines: Sequence[_Expected], left_ms: float, takes_ms: float
    ) -> Job:
        now, within, timed = now_ms(), min(left_ms, _SLOWER * takes_ms), self._choice.is_timed
        cores = self._generator.threads
        found = [
            Candidate(one, ms, f"expected {ms:.3g} ms", 0, ms, ms, _UNUSED, is_noisy=False, cores=cores)
            for one, ms in engines
        ]
        return Job(None, rows, steps, of.terms.client, now, now + left_ms, found, timed, continues=True, within=within)

    async def _run(self, work: tuple[Row, str] | None, job: Job) -> None:
        for row, found in await self._desk.answer(self, work, job):
            generation = self._of.get(row)
            if generation is None:  # its client is gone, perhaps before it joined
                self._gone.append(row)
                continue
            if not isinstance(found, Piece) or found.finish is not None:
                del self._of[row]
            generation.put(row, found)


def _least_ms(engines: Sequence[_Expected]) -> float:
    return min(ms for _, ms in engines)
