"""The loop: prompts row by row, then one token for every row at a time, until all have ended; of one row several at a
time where a draft proposes them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from itertools import zip_longest
from time import perf_counter
from types import TracebackType
from typing import TypeVar

from ...errors import InputError
from ...ownership import Owner
from .drafting import Drafting, Proposal
from .pace import Chosen, Pace
from .row import Generated, Piece, Row
from .session import Session

_Given = TypeVar("_Given")


class Generation:
    """An iterator of the tokens of a call, as they come; ``result`` is what they make so far.

    It has its session until it is exhausted, closed, or collected; a consumer that stops early closes it, which a
    ``with`` block does too. What was written by then stays in the session, of a run that checked drafted tokens all of
    them that were accepted. The thread that asked for the last token has it, whichever made it.
    """

    def __init__(self, loop: Loop) -> None:
        """Takes the session of ``loop`` for its owner, which is over when the generation has ended. Raises InputError
        where it cannot."""
        self._owner, self._loop, self._pieces = loop.owner, loop, loop.pieces()
        loop.session.take(loop.owner, self._pieces)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self._owner.is_over and getgeneratorstate(self._pieces) != GEN_CLOSED:
            raise InputError("generation: its session went to a later one of the same thread; open a session for each")
        self._require_nobody_inside()
        self._loop.hold()
        return self._alone(self._pieces.__next__)

    def result(self) -> Generated:
        """The rows as far as they have come; all of them once the iterator is exhausted."""
        return self._loop.result()

    def finish(self) -> Generated:
        """Generates what is left, and gives all of it back."""
        for _ in self:
            pass
        return self.result()

    def close(self) -> None:
        """Ends it where it is; closing it again does nothing. Raises InputError while another thread iterates."""
        self._alone(self._pieces.close)
        self._owner.is_over = True  # a generator that never began runs none of its code
        self._loop.end()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_nobody_inside(self) -> None:
        if getgeneratorstate(self._pieces) == GEN_RUNNING:
            raise InputError("generation: another thread is generating with it; iterate it in one thread at a time")

    def _alone(self, call: Callable[[], _Given]) -> _Given:
        """``call`` of the generator, which Python refuses while another thread is inside."""
        try:
            return call()
        except ValueError:
            self._require_nobody_inside()
            raise


@dataclass
class Loop:
    """The loop of a generation: ``rows`` in ``session``, which ``owner`` has until the end, when ``ended`` is called.

    With ``own`` no key that another engine computed is used; ``drafting`` is for one row. It does not know the
    Generation, so that one nobody has any more is collected at once.
    """

    session: Session
    rows: Sequence[Row]
    pace: Pace
    owner: Owner
    ended: Callable[[], None]
    own: bool = False
    drafting: Drafting | None = None

    def __post_init__(self) -> None:
        self._step_ms, self._stepped = 0.0, 0

    def result(self) -> Generated:
        """The rows as far as they have come."""
        rate = 1e3 * self._stepped / self._step_ms if self._step_ms else None
        return Generated(tuple(row.result() for row in self.rows), rate, self.session.task)

    def hold(self) -> None:
        """Says to the session which thread continues."""
        if not self.owner.is_over:
            self.session.hold()

    def end(self) -> None:
        """Lets go of what it had, once its owner is over; a second time there is nothing left."""
        self.session.give_back(self.owner)
        self.ended()

    def pieces(self) -> Generator[Piece, None, None]:
        """Every token, to the end."""
        try:
            self.session.arrange(len(self.rows), 1 + max(len(row.prompt) for row in self.rows))
            for place in range(len(self.rows)):
                yield self._read_prompt(place)
            active = self._leave(list(self.rows))
            while active:
                pieces = self._run(active)
                active = self._leave(active)
                yield from pieces
        finally:
            self.owner.is_over = True  # first, see ownership.py
            self.end()

    def _read_prompt(self, place: int) -> Piece:
        """The first token of the row at ``place``; every row is at the place of its number until all have theirs."""
        session, rows = self.session, self.rows
        row, count = rows[place], len(rows)
        # Where nothing depends on it, it is not counted: of many rows that takes longer than a step.
        tokens = (
            sum(session.unknown(later.prompt, self.pace.engines[0], later.source) for later in rows[place:])
            if self.pace.is_timed
            else 0
        )
        # Before the choice: a deadline counts the time that it takes to open them.
        for engine in self.pace.engines:
            session.bind(engine, count)
        if self.drafting is not None:
            self.drafting.bind()
        chosen = self.pace.for_prompts(tokens, count, row.tokens_left - 1)
        started = perf_counter()
        logits, row.reused_tokens = session.prefill(place, row.prompt, chosen.engine, count, self.own, row.source)
        row.prompt_ms = 1e3 * (perf_counter() - started)
        self.pace.read(chosen.engine, row.prompt_tokens - row.reused_tokens, row.prompt_ms)
        return row.pick(logits, chosen)

    def _run(self, active: Sequence[Row]) -> list[Piece]:
        """The tokens of the next run, for the rows at the first places."""
        started = perf_counter()
        chosen = self.pace.for_step(len(active), max([row.tokens_left for row in active]))
        if self.drafting is not None:
            proposal = self.drafting.propose(active[0], chosen)
            if proposal.drafted:
                return self._check(active[0], proposal, self.drafting, started)
            chosen = proposal.chosen
        return self._step(active, chosen, started)

    def _step(self, active: Sequence[Row], chosen: Chosen, started: float) -> list[Piece]:
        """One more token for each of the rows at the first places, in their order."""
        called = perf_counter()
        logits = self.session.step([row.last for row in active], chosen.engine)
        returned = perf_counter()
        pieces = [row.pick(own, chosen) for row, own in zip(active, logits, strict=True)]
        took = 1e3 * (perf_counter() - started)
        self.pace.stepped(chosen.engine, len(active), 1e3 * (returned - called), took)
        for row in active:
            row.token_ms.append(took)
        self._count(len(pieces), took)
        return pieces

    def _check(self, row: Row, proposal: Proposal, drafting: Drafting, started: float) -> list[Piece]:
        """As many of the proposed tokens as are accepted, and the one that follows them."""
        chosen, draft, drafted = proposal
        called = perf_counter()
        logits = self.session.check([row.last, *(each.token for each in drafted)], chosen.engine)
        returned = perf_counter()
        pieces: list[Piece] = []
        for own, proposed in zip_longest(logits, drafted):
            pieces.append(row.pick(own, chosen, proposed))
            if row.finish is not None or proposed is None or row.last != proposed.token:
                break
        self.session.keep(len(pieces))
        judged = list(zip(pieces, drafted, strict=False))
        accepted = sum(piece.token == proposed.token for piece, proposed in judged)
        row.checked(draft, len(drafted), accepted)
        drafting.checked(proposal, len(judged), accepted, 1e3 * (returned - called))
        took = 1e3 * (perf_counter() - started)
        row.token_ms += [took / len(pieces)] * len(pieces)
        self._count(len(pieces), took)
        return pieces

    def _count(self, tokens: int, took: float) -> None:
        self._step_ms += took
        self._stepped += tokens

    def _leave(self, active: list[Row]) -> list[Row]:
        """Those of the rows at the first places that continue, at the first places."""
        place = 0
        while place < len(active):
            if active[place].finish is None:
                place += 1
            else:
                self.session.leave(place, len(active))
                active[place] = active[-1]
                active.pop()
        return active
