"""What is drafted in each run of a generation, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ....bundle.entries.engine_entry import EngineEntry
from ....errors import SelectionError
from ..calls.pace import Writer
from ..calls.row import Row
from ..lookup import NGRAM
from ..rejection import Drafted
from .drafts import AUTO, Draft
from .gains import Gain, Gains

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
        """Counts a run of ``ms`` that checked a proposal: ``judged`` of its tokens, ``accepted`` of them kept."""
        ...


class AskedDraft:
    """One draft in every run, with at most ``most`` tokens that ``target`` checks; ``gains`` learns from it."""

    def __init__(self, draft: Draft, most: int, target: EngineEntry, gains: Gains) -> None:
        self._draft, self._most, self._target, self._gains = draft, most, target, gains
        self.reason = f"drafted by {draft.name}, at most {most} a run"

    def bind(self) -> None:
        self._draft.bind()

    def propose(self, row: Row, writer: Writer) -> Proposal:
        # One more token than is drafted is picked.
        return Proposal(writer, self._draft.name, self._draft.propose(row, min(self._most, row.tokens_left - 1)))

    def checked(self, proposal: Proposal, judged: int, accepted: int, ms: float) -> None:
        self._gains.checked(self._target, proposal.draft, len(proposal.drafted), judged, accepted, ms)


class BestDraft:
    """In every run the draft and the number of its tokens that are expected to write fastest; none of ``drafts`` where
    steps are. By what runs of this model took, and how many of the tokens were accepted."""

    reason = f"draft {AUTO}"

    def __init__(self, drafts: Sequence[Draft], most: int, target: EngineEntry, gains: Gains) -> None:
        self._drafts, self._most, self._target, self._gains = list(drafts), most, target, gains
        self._left_out: list[str] = []  # by a memory cap
        self._said: tuple[str | None, Writer] | None = None  # which submodel drafts, None until one was judged

    def bind(self) -> None:
        self._gains.begin(self._target)
        for draft in list(self._drafts):
            try:
                draft.bind()
            except SelectionError:
                self._drafts.remove(draft)
                self._left_out.append(draft.name)

    def propose(self, row: Row, writer: Writer) -> Proposal:
        able = [draft for draft in self._drafts if draft.can_propose(row)]
        ranked = self._gains.ranked(self._target, able, min(self._most, row.tokens_left - 1))
        if not ranked:
            return Proposal(self._said_writer(writer), "", [])
        draft, count, factor = ranked[0]
        if factor < _LEAST_GAIN:
            self._say("", writer, ranked)
            return Proposal(self._said_writer(writer), "", [])
        if draft.name != NGRAM:  # which comes and goes with the text
            self._say(draft.name, writer, ranked)
        return Proposal(self._said_writer(writer), draft.name, draft.propose(row, count))

    def checked(self, proposal: Proposal, judged: int, accepted: int, ms: float) -> None:
        self._gains.checked(self._target, proposal.draft, len(proposal.drafted), judged, accepted, ms)

    def _say(self, name: str, writer: Writer, ranked: Sequence[Gain]) -> None:
        """Makes the reason of ``writer`` say that ``name`` drafts, or nothing does, where it said another."""
        if self._said is not None and self._said[0] == name:
            return
        expected = ", ".join(f"{gain.draft.name} {gain.factor:.2f}" for gain in ranked)
        who = f"{name} drafts" if name else "nothing drafted"
        reason = f"{self._without(writer)}: {who}; expected times as fast as steps: {expected}"
        self._said = name, Writer(writer.engine, reason)

    def _said_writer(self, writer: Writer) -> Writer:
        if self._said is None and self._left_out:
            self._said = None, Writer(writer.engine, self._without(writer))
        return writer if self._said is None else self._said[1]

    def _without(self, writer: Writer) -> str:
        """Its reason, and which drafts there are not."""
        if not self._left_out:
            return writer.reason
        return f"{writer.reason} without {', '.join(self._left_out)}, for which the memory cap has no room"
