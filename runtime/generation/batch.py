"""Rows that step together and come and go between steps, for a server: each reads its prompt at the place behind the
others, and where one leaves the last takes its place."""

from collections.abc import Sequence
from math import inf
from time import perf_counter

from ...bundle.entries.engine_entry import EngineEntry
from ...errors import InputError
from ...ownership import Owner
from .draft_gains import StepTimes
from .row import Piece, Row
from .session import Session

# Tokens of a prompt in a run, beside which others wait.
MOST_READ = 128
# The same where each of them is a run.
_MOST_STEPS = 16


class Batch:
    """Up to ``session.rows`` rows in a session of their own. One thread at a time uses it.

    ``engines`` may generate, the largest first, all with heads alike, so that one continues what another computed. A
    beginning in common with rows that are there, or were, is not computed again.
    """

    def __init__(self, session: Session, engines: Sequence[EngineEntry], times: StepTimes, owner: Owner) -> None:
        """``owner`` has the session, and what else was taken for it, until ``close``."""
        self.session, self.engines = session, engines
        self.rows: list[Row] = []
        self._times, self._owner, self._taker = times, owner, Owner()
        session.take(self._taker)
        for engine in engines:
            session.bind(engine, session.rows)

    @property
    def most_read(self) -> int:
        """Tokens of a prompt that are read while others wait."""
        return min(MOST_READ, max(_MOST_STEPS, self.engines[0].bucket.sequence))

    def to_read(self, row: Row, most: float = inf) -> list[tuple[EngineEntry, float]]:
        """The engines with the milliseconds that each is expected to take for what is left to read of ``row``, or for
        ``most`` tokens of it."""
        session, times = self.session, self._times
        left = [min(most, session.unknown(row.tokens, one, row.source)) for one in self.engines]
        return [(one, times.expected_prompt_ms(one, int(n))) for one, n in zip(self.engines, left, strict=True)]

    def to_step(self, rows: int) -> list[tuple[EngineEntry, float]]:
        """The engines with the milliseconds that each is expected to take for a step of so many rows."""
        return [(one, self._times.expected_ms(one, rows)) for one in self.engines]

    def join(self, row: Row, engine: EngineEntry, reason: str) -> Piece | None:
        """The next token of ``row``, which steps with the others from now on, perhaps again after it left; None while
        more than ``most_read`` of its tokens are left to read, of which so many are. There is room for it, and no other
        joins between."""
        session, place, started, tokens = self.session, len(self.rows), perf_counter(), row.tokens
        left = 0 if row.source is not None else session.unknown(tokens, engine)
        is_whole = left <= self.most_read
        read = tokens if is_whole else tokens[: len(tokens) - left + self.most_read]
        # As one of several from the first row on: a cache that is laid out for one loses it when the second comes.
        rows = min(max(place + 1, 2), session.rows)
        logits, kept = session.prefill(place, read, engine, rows, source=row.source)
        took = 1e3 * (perf_counter() - started)
        self._times.ran_prompt(engine, (len(read) if row.source is None else row.prompt_tokens) - kept, took)
        if not row.prompt_ms:
            row.reused_tokens = kept
        row.prompt_ms += took
        if not is_whole:
            return None
        piece = row.pick(logits, row.continued_by(engine, reason))
        if piece.finish is None:
            self.rows.append(row)
        return piece

    def step(self, engine: EngineEntry, reason: str) -> list[tuple[Row, Piece | InputError]]:
        """One more token of every row, or why it has none; those that end with it leave."""
        started = perf_counter()
        logits = self.session.step([row.last for row in self.rows], engine)
        took = 1e3 * (perf_counter() - started)
        self._times.ran(engine, len(self.rows), took)
        found: list[tuple[Row, Piece | InputError]] = []
        for row, own in zip(self.rows, logits, strict=True):
            try:
                found.append((row, row.pick(own, row.continued_by(engine, reason))))
            except InputError as failure:
                found.append((row, failure))
            row.token_ms.append(took)
        for row, piece in found:
            if not isinstance(piece, Piece) or piece.finish is not None:
                self.leave(row)
        return found

    def leave(self, row: Row) -> None:
        """Nothing more is wanted of ``row``, which may have left before."""
        if row in self.rows:
            place = self.rows.index(row)
            self.session.leave(place, len(self.rows))
            last = self.rows.pop()
            if last is not row:
                self.rows[place] = last

    def close(self) -> None:
        """Gives its memory back."""
        self._taker.is_over = True
        self.session.close()
        self._owner.is_over = True
