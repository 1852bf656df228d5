"""Text that a bundle generates for many clients: one batch of rows for each choice of submodel, whose steps are jobs of
the queue like any other, so that runs of other requests go between them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..bucket import Bucket
from ..bundle.entries.engine_entry import EngineEntry
from ..errors import InputError, OverloadError
from ..runtime.candidates import Candidate
from ..runtime.generation.batch import MOST_READ, Batch
from ..runtime.generation.generator import Generator
from ..runtime.generation.options import GenerationRequest
from ..runtime.generation.row import Piece, Row
from ..runtime.running_estimate import RunningEstimate
from .desk import Desk
from .scheduler import Job, Run
from .served import now_ms

# Rows that step together, tokens of each with its prompt, batches of one bundle, each by a choice of its own, and rows
# that wait for them beyond which no request is taken.
_MOST_ROWS, _MOST_TOKENS, _MOST_BATCHES, _MOST_WAITING = 8, 4096, 4, 256
_SOME_MS = 1.0


class Terms(NamedTuple):
    """Who asks, when that came, and what it states; without a deadline it waits for ``patience_ms`` at most, and so
    does each of its steps."""

    client: str
    arrived: float
    patience_ms: float
    deadline_ms: float | None

    @property
    def due(self) -> float:
        return self.arrived + (self.patience_ms if self.deadline_ms is None else self.deadline_ms)


@dataclass(eq=False)
class Generation:
    """The rows of one request in the ``queue`` of their choice, which puts each token, or why there is none, into
    ``pieces``."""

    rows: Sequence[Row]
    terms: Terms
    queue: _Queue
    pieces: asyncio.Queue[tuple[Row, Piece | BaseException]] = field(default_factory=asyncio.Queue)

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
    """The batches of one bundle. Everything but its runs is done on the event loop of ``desk``."""

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
        fit, and OverloadError where there is no room for one more choice."""
        waiting = sum(queue.waiting for queue in self._queues.values())
        if waiting >= _MOST_WAITING:
            raise OverloadError(f"{waiting} texts wait to be continued; ask again later", 1e3)
        rows = await self._desk.aside(letters, self._generator.rows, request, _MOST_TOKENS)
        stated = dict(choice) if terms.deadline_ms is None else {**choice, "deadline_ms": _SOME_MS}
        queue = self._queue(tuple(sorted(stated.items())), GenerationRequest(**stated))
        generation = Generation(rows, terms, queue)
        queue.add(generation)
        return generation

    def _queue(self, key: tuple[Any, ...], choice: GenerationRequest) -> _Queue:
        """That of a choice; where it is one too many, in the place of one that nobody uses."""
        queue = self._queues.pop(key, None)
        if queue is None or queue.is_broken:
            idle = [name for name, one in self._queues.items() if not one.is_busy]
            if len(self._queues) >= _MOST_BATCHES and not idle:
                raise OverloadError("submodels of other requests generate; ask again later", 1e3)
            if len(self._queues) >= _MOST_BATCHES:
                self._queues.pop(idle[0]).close()
            queue = _Queue(self._generator, self._desk, choice)
        self._queues[key] = queue  # the last one used is the last
        return queue


class _Queue:
    """The rows of one choice: those that wait, and the batch of those that step, which ``_drive`` moves on."""

    def __init__(self, generator: Generator, desk: Desk, choice: GenerationRequest) -> None:
        self._generator, self._desk, self._choice = generator, desk, choice
        self._waiting: deque[tuple[Row, Generation]] = deque()
        self._of: dict[Row, Generation] = {}
        self._gone: list[Row] = []
        self._driver: asyncio.Task[None] | None = None
        self._batch: Batch | None = None
        self.is_broken = False

    @property
    def rows(self) -> int:
        return len(self._of)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return self._driver is not None

    def add(self, generation: Generation) -> None:
        self._waiting += [(row, generation) for row in generation.rows]
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())

    def leave(self, generation: Generation) -> None:
        """Its rows wait no more, and those in the batch leave it before the next step."""
        self._waiting = deque(each for each in self._waiting if each[1] is not generation)
        for row in generation.rows:
            if self._of.pop(row, None) is not None:
                self._gone.append(row)

    def close(self) -> None:
        if self._batch is not None:
            self._batch.close()

    def replies(self, works: Sequence[Row | None], run: Run, /) -> Sequence[list[tuple[Row, Piece | InputError]]]:
        """What a run gives: the first token of a row, or for None one more of all that are there."""
        (row,), batch, engine = works, self._batch, run.candidate.engine
        assert batch is not None
        while self._gone:
            batch.leave(self._gone.pop())
        reason = run.reason or batch.reason
        if row is None:
            return [batch.step(engine, reason) if batch.rows else []]
        try:
            piece = batch.join(row, engine, reason)
        except InputError as failure:
            return [[(row, failure)]]
        return [[] if piece is None else [(row, piece)]]

    async def _drive(self) -> None:
        """A part of a prompt and a step in turn, while there are any."""
        try:
            if self._batch is None:
                self._batch = await asyncio.to_thread(self._generator.batch, self._choice, _MOST_ROWS, _MOST_TOKENS)
            joining: Any = None
            while self._waiting or self._of:
                if joining in self._of and joining not in self._batch.rows:
                    await self._read_on(self._batch, joining)
                elif self._waiting and len(self._of) < self._batch.session.rows:
                    joining, generation = self._next()
                    await self._join(self._batch, joining, generation)
                self._refuse_late()
                if rows := [row for row in self._batch.rows if row in self._of]:
                    await self._step(self._batch, rows)
        except Exception as failure:  # noqa: BLE001  (every client hears of it)
            self.is_broken = True
            for row, generation in [*self._of.items(), *self._waiting]:
                generation.pieces.put_nowait((row, failure))
            self._of.clear()
            self._waiting.clear()
        finally:
            self._driver = None
            if self.is_broken:
                self.close()

    def _next(self) -> tuple[Row, Generation]:
        """The first that waits, of the client with the fewest rows in the batch."""
        rows = Counter(generation.terms.client for generation in self._of.values())
        found = min(self._waiting, key=lambda each: rows[each[1].terms.client])
        self._waiting.remove(found)
        return found

    def _refuse_late(self) -> None:
        """Those that found no room in time."""
        now = now_ms()
        for row, generation in [each for each in self._waiting if each[1].terms.due <= now]:
            self._waiting.remove((row, generation))
            waited = now - generation.terms.arrived
            failure = OverloadError(f"deadline passed while it waited, {waited:.3g} ms; ask again later", 0.0)
            generation.pieces.put_nowait((row, failure))

    async def _join(self, batch: Batch, row: Row, generation: Generation) -> None:
        """The prompt of a row, which is read where it leaves time for all tokens of the smallest submodel."""
        terms, timed = generation.terms, generation.terms.deadline_ms is not None
        steps_ms = _steps_ms(batch, row, len(self._of) + 1) if timed else 0.0
        due = terms.due - steps_ms
        job = Job(None, 1, row.prompt_tokens, terms.client, terms.arrived, due, _candidates(batch.to_read(row)), timed)
        self._of[row] = generation
        try:
            await self._run(row, job)
        except OverloadError as failure:
            needs_ms = failure.needs_ms + steps_ms
            failure = OverloadError(
                f"no submodel generates {row.tokens_left} tokens behind {row.prompt_tokens} within "
                f"{terms.due - terms.arrived:.3g} ms, it would need {needs_ms:.3g} ms; allow more time, ask for fewer "
                "tokens, or ask again later",
                needs_ms,
            )
            if self._of.pop(row, None) is not None:
                generation.pieces.put_nowait((row, failure))

    async def _read_on(self, batch: Batch, row: Row) -> None:
        """The next part of a prompt. Under a deadline it has its share of the time that is left to read in."""
        terms, now, part = self._of[row].terms, now_ms(), batch.to_read(row, MOST_READ)
        timed, left_ms = terms.deadline_ms is not None, terms.patience_ms
        if timed:
            part_ms, all_ms = (min(ms for _, ms in each) for each in (part, batch.to_read(row)))
            left_ms = max(0.0, terms.due - _steps_ms(batch, row, len(self._of)) - now) * part_ms / max(all_ms, part_ms)
        job = Job(None, 1, MOST_READ, terms.client, now, now + left_ms, _candidates(part), timed, continues=True)
        await self._run(row, job)

    async def _step(self, batch: Batch, rows: Sequence[Row]) -> None:
        """One more token of ``rows``. Under deadlines it is due with what is left of the shortest."""
        now, terms = now_ms(), self._of[rows[0]].terms
        timed, left_ms = terms.deadline_ms is not None, terms.patience_ms
        if timed:
            left_ms = max(0.0, min((self._of[row].terms.due - now) / max(1, row.tokens_left) for row in rows))
        engines = _candidates(batch.to_step(len(rows)))
        job = Job(None, len(rows), 1, terms.client, now, now + left_ms, engines, timed, continues=True)
        await self._run(None, job)

    async def _run(self, row: Row | None, job: Job) -> None:
        for one, found in await self._desk.answer(self, row, job):
            generation = self._of.get(one)
            if generation is None:  # its client is gone, perhaps before it joined
                self._gone.append(one)
                continue
            if not isinstance(found, Piece) or found.finish is not None:
                del self._of[one]
            generation.pieces.put_nowait((one, found))


def _steps_ms(batch: Batch, row: Row, rows: int) -> float:
    """What the tokens behind the first one of ``row`` take at least, beside so many ``rows``."""
    return (row.tokens_left - 1) * min(ms for _, ms in batch.to_step(rows))


# Of figures that steps correct themselves.
_UNUSED = RunningEstimate(lambda: None).of("", Bucket(1, 1))


def _candidates(engines: Sequence[tuple[EngineEntry, float]]) -> list[Candidate]:
    """As the queue chooses among them."""
    return [Candidate(one, ms, f"expected {ms:.3g} ms", 0.0, ms, ms, _UNUSED, is_noisy=False) for one, ms in engines]
