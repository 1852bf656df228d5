"""What is drafted in each run of a generation, and by whom."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..rejection import Drafted
from .drafts import Draft
from .pace import Writer
from .row import Row


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
