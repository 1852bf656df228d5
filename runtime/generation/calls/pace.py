"""Which submodel writes the next token: the largest that keeps what was promised, asked again at every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from ....bundle.entries.engine_entry import EngineEntry
from ....errors import SelectionError
from ...inputs.limits import positive_limit
from .step_times import StepTimes


@dataclass(frozen=True)
class Promise:
    """How fast tokens are to come: so many each second in every row, or all that were asked for within ``deadline_ms``
    of the call, the prompt included. At most one of them; none is no promise. Raises SelectionError."""

    tokens_per_second: float | None = None
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens_per_second", "deadline_ms"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, positive_limit(name, getattr(self, name)))
        if self.tokens_per_second is not None and self.deadline_ms is not None:
            raise SelectionError("expected at most one of `tokens_per_second` and `deadline_ms`")

    def __bool__(self) -> bool:
        return self.tokens_per_second is not None or self.deadline_ms is not None


class Writer(NamedTuple):
    """The engine that writes the next token, and why."""

    engine: EngineEntry
    reason: str


class Pace:
    """The choices of one generation.

    A rate is kept from the first token on: token ``k`` after it is due ``k`` periods later, so that what a small
    submodel saved a larger one may spend. Only time of the generation counts, not what its consumer does between two
    tokens. A deadline counts all time, and what is left of it is divided among the tokens that are left, which may be
    fewer in the end. Where not even the smallest submodel keeps the promise, it writes, and the reason says so.

    What one submodel wrote only those continue that have no more heads in any layer, of the same size, so that the
    choice is among them from then on.
    """

    def __init__(
        self, engines: Sequence[EngineEntry], reason: str, promise: Promise, times: StepTimes, started: float
    ) -> None:
        """``engines``, the largest first, are those to choose from, and ``reason`` why the first of them is without a
        promise; the call began at ``started`` (``perf_counter``, seconds)."""
        self.engines, self._promise, self._times, self._started = engines, promise, times, started
        if promise.tokens_per_second is not None:
            reason += "; a rate asks nothing of the prompt"
        self._first = Writer(engines[0], reason)
        self._last: Writer | None = None
        self._last_fits = True
        self._continued: EngineEntry | None = None  # by all that are left
        self._steps, self._spent_ms, self._left_out = 0, 0.0, 0

    @property
    def is_timed(self) -> bool:
        """Whether it matters how long prompts take."""
        return self._promise.deadline_ms is not None

    def for_prompts(self, tokens: int, rows: int, steps: int) -> Writer:
        """Who reads prompts of ``tokens`` in all, whose ``rows`` rows then take up to ``steps`` steps each. A rate asks
        nothing of prompts."""
        if not self.is_timed:
            return self._first
        return self._within(
            self._left_ms(),
            [
                self._times.expected_prompt_ms(engine, tokens) + steps * self._times.expected_ms(engine, rows)
                for engine in self.engines
            ],
            "left for the prompt and all tokens",
        )

    def for_step(self, rows: int, steps: int) -> Writer:
        """Who writes the next token of ``rows`` rows, the first of at most ``steps`` that are left."""
        if not self._promise:
            return self._first
        expected = [self._times.expected_ms(engine, rows) for engine in self.engines]
        rate = self._promise.tokens_per_second
        if rate is not None:
            due = 1e3 * (self._steps + 1) / rate
            return self._within(due - self._spent_ms, expected, "until the token is due")
        return self._within(self._left_ms() / steps, expected, "left for each token")

    def stepped(self, engine: EngineEntry, rows: int, step_ms: float, all_ms: float) -> None:
        """Counts a step: ``step_ms`` of the engine, ``all_ms`` with the work beside it."""
        self._times.ran(engine, rows, step_ms)
        self._leave_out(engine)
        self._steps += 1
        self._spent_ms += all_ms

    def read(self, engine: EngineEntry, tokens: int, ms: float) -> None:
        """Counts a prompt; ``tokens`` of it were computed."""
        self._times.ran_prompt(engine, tokens, ms)
        self._leave_out(engine)

    def _leave_out(self, writer: EngineEntry) -> None:
        """Chooses no more among engines that cannot continue what ``writer`` wrote."""
        if writer is self._continued:
            return
        self._continued = writer
        able = [engine for engine in self.engines if engine.can_continue(writer)]
        self._left_out += len(self.engines) - len(able)
        self.engines = able

    def _left_ms(self) -> float:
        assert self._promise.deadline_ms is not None
        return self._promise.deadline_ms - 1e3 * (perf_counter() - self._started)

    def _within(self, room_ms: float, expected: Sequence[float], what: str) -> Writer:
        """The first engine that is expected to take no more than there is room for; the last writer where
        nothing but the figures has changed."""
        fitting = next((place for place, ms in enumerate(expected) if ms <= room_ms), None)
        engine = self.engines[-1 if fitting is None else fitting]
        if self._last is None or self._last.engine is not engine or self._last_fits != (fitting is not None):
            figures = "expected {:.3g} ms {} {:.3g} ms {}"
            if fitting is None:
                reason = f"the smallest, {figures.format(expected[-1], '>', room_ms, what)}: the promise is not kept"
            else:
                reason = figures.format(expected[fitting], "<=", room_ms, what)
            if self._left_out:
                reason += f"; {self._left_out} with heads that earlier tokens lack, or of another size, cannot continue"
            self._last, self._last_fits = Writer(engine, reason), fitting is not None
        return self._last
