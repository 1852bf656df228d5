"""What is drafted in each run of a generation, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...bundle.entries.engine_entry import EngineEntry
from ..rejection import Drafted
from .drafts import AUTO, NGRAM, Draft
from .gains import Gains
from .pace import Writer
from .row import Row

# A gain below it is not worth the noise of the figures.
_LEAST_GAIN = 1.05


class Proposal(NamedTuple):
    """The next run of a row: ``writer`` checks the ``drafted`` tokens of the draft of this name, or steps where there
    are none."""

    writer: Writer
    draft: str
    drafted: list[Drafted]


class Drafting(Protocol):
    """Of one generation of one row. ``reason`` is what it adds to the reason of who writes."""

    @property
    def reason(self) -> str: ...

    def bind(self) -> None:
        """Opens what it may need."""
        ...

    def propose(self, row: Row, writer: Writer) -> Proposal:
        """For the next run of ``row``, whose tokens are ``writer``'s."""
        ...

    def checked(self, proposal: Proposal, judged: int, accepted: int, ms: float) -> None:
        """Counts a run of ``ms`` that checked a proposal: ``judged`` of its tokens, of which ``accepted`` were kept."""
        ...


class AskedDraft:
    """One draft in every run, with at most ``most`` tokens."""

    def __init__(self, draft: Draft, most: int) -> None:
        self._draft, self._most = draft, most
        self.reason = f"drafted by {draft.name}, at most {most} a run"

    def bind(self) -> None:
        self._draft.bind()

    def propose(self, row: Row, writer: Writer) -> Proposal:
        # One more token than is drafted is picked.
        return Proposal(writer, self._draft.name, self._draft.propose(row, min(self._most, row.tokens_left - 1)))

    def checked(self, proposal: Proposal, judged: int, accepted: int, ms: float) -> None:
        """What is drafted does not depend on it."""


class BestDraft:
    """In every run the draft and the number of its tokens that are expected to write fastest; none of ``drafts`` where
    steps are. By what runs of this model took, and how many of the tokens were accepted."""

    reason = f"draft {AUTO}"

    def __init__(self, drafts: Sequence[Draft], most: int, target: EngineEntry, gains: Gains) -> None:
        self._drafts, self._most, self._target, self._gains = drafts, most, target, gains
        self._said: tuple[str, Writer] | None = None  # which submodel drafts

    def bind(self) -> None:
        self._gains.begin(self._target)
        for draft in self._drafts:
            draft.bind()

    def propose(self, row: Row, writer: Writer) -> Proposal:
        able = [draft for draft in self._drafts if draft.can_propose(row)]
        best = self._gains.best(self._target, able, min(self._most, row.tokens_left - 1))
        if best is None:
            return Proposal(self._writer(writer), "", [])
        draft, count, factor = best
        pays = factor >= _LEAST_GAIN
        drafted = draft.propose(row, count) if pays else []
        if draft.name == NGRAM and pays:  # which comes and goes with the text
            return Proposal(self._writer(writer), NGRAM, drafted)
        name = draft.name if pays else ""
        if self._said is None or self._said[0] != name:
            who = draft.name if pays else f"nothing drafted, the best ({draft.name})"
            reason = f"{writer.reason}: {who} is expected to write {factor:.2f} times as fast as steps"
            self._said = name, Writer(writer.engine, reason)
        return Proposal(self._writer(writer), name, drafted)

    def _writer(self, writer: Writer) -> Writer:
        return writer if self._said is None else self._said[1]

    def checked(self, proposal: Proposal, judged: int, accepted: int, ms: float) -> None:
        self._gains.checked(self._target, proposal.draft, len(proposal.drafted), judged, accepted, ms)
