"""Who proposes tokens that another checks: a smaller submodel on the same cache, or the text itself."""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

from ....bundle.entries.engine_entry import EngineEntry
from ....errors import InputError
from ..calls.row import Row
from ..calls.session import Session
from ..calls.step_times import StepTimes
from ..lookup import NGRAM, look_up
from ..rejection import Drafted

# What may be asked for beside submodels and n-gram: any of them that pays.
AUTO = "auto"


class Draft(Protocol):
    """Proposes the next tokens of one row. ``name`` is what answers call it."""

    @property
    def name(self) -> str: ...

    def bind(self) -> None:
        """Opens what it needs, so that no token waits for that. Raises SelectionError where a memory cap does not allow
        it."""
        ...

    def can_propose(self, row: Row) -> bool:
        """Whether ``propose`` would return anything."""
        ...

    def propose(self, row: Row, count: int) -> list[Drafted]:
        """``count`` tokens behind the row's last, fewer than it has left; or none."""
        ...

    @property
    def expected_ms(self) -> float:
        """What each of them takes."""
        ...


class SubmodelDraft:
    """A submodel smaller than the one that checks. Its steps read the other's keys and write their own behind them,
    which the check overwrites (MatFormer, appendix C.1)."""

    def __init__(self, engine: EngineEntry, session: Session, times: StepTimes) -> None:
        self.name, self._engine, self._session, self._times = engine.submodel, engine, session, times

    def bind(self) -> None:
        self._session.bind(self._engine, 1, reads_prompts=False)

    def can_propose(self, row: Row) -> bool:
        return row.tokens_left > 1

    def propose(self, row: Row, count: int) -> list[Drafted]:
        drafted: list[Drafted] = []
        token = row.last
        for ahead in range(count):
            started = perf_counter()
            logits = self._session.draft(token, ahead, self._engine)
            self._times.ran(self._engine, 1, 1e3 * (perf_counter() - started))
            try:
                drafted.append(row.draft(logits, ahead))
            except InputError as failure:  # not of the submodel that writes
                raise InputError(f"draft {self.name}: {failure}") from failure
            token = drafted[-1].token
        return drafted

    @property
    def expected_ms(self) -> float:
        return self._times.expected_ms(self._engine, 1)


class NgramDraft:
    """What followed the last tokens where the row had them before, or the prompt that its encoder read."""

    name = NGRAM
    expected_ms = 0.0

    def bind(self) -> None:
        """It needs nothing."""

    def can_propose(self, row: Row) -> bool:
        return bool(self.propose(row, 1))

    def propose(self, row: Row, count: int) -> list[Drafted]:
        return [Drafted(token) for token in look_up(row.seen, count).tolist()]
