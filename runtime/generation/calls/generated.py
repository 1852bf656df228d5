"""What a generation gives back: tokens as they come, and the rows that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..sampling import LogProbabilities

# A row ends with a token of the model's that ends texts, at a stop of the request's, or at its largest number of
# tokens.
Finish = Literal["end", "stop", "length"]


class Piece(NamedTuple):
    """One token of row ``row``, and the ``text`` that is certain since: often its own, sometimes none, sometimes that
    of several. ``finish`` is stated of the last token of a row."""

    row: int
    token: int
    text: str
    submodel: str
    log_probabilities: LogProbabilities | None
    finish: Finish | None


@dataclass(frozen=True)
class Run:
    """How many tokens in turn one submodel wrote, and why it did when it began."""

    submodel: str
    tokens: int
    reason: str


@dataclass(frozen=True)
class DraftedTokens:
    """What a draft proposed: ``drafted`` tokens, checked in so many ``runs`` of the submodel that wrote, which
    ``accepted`` so many of them."""

    draft: str
    runs: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class GeneratedRow:
    """One row. ``tokens`` are all that were picked, also the one that ended it; ``text`` is what they add to the
    prompt, up to the stop, and None where the bundle has no tokenizer. ``finish`` is None where the generation was
    closed before the row ended; ``stop`` is the id or string that ended it. ``runs`` say which submodel wrote which
    tokens. Of the ``prompt_tokens`` ``reused_tokens`` were in the session's cache; the others took ``prompt_ms``, and
    each token after the first ``token_ms``, with all rows that stepped together; tokens that one run checked have equal
    parts of its time. ``drafts`` say what was drafted, by whom, and how much of it was accepted.
    """

    text: str | None
    tokens: tuple[int, ...]
    finish: Finish | None
    stop: int | str | None
    runs: tuple[Run, ...]
    log_probabilities: tuple[LogProbabilities, ...] | None
    prompt_tokens: int
    reused_tokens: int
    prompt_ms: float
    token_ms: tuple[float, ...]
    drafts: tuple[DraftedTokens, ...] = ()

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token; None where there is no other."""
        return 1e3 * len(self.token_ms) / sum(self.token_ms) if self.token_ms else None


@dataclass(frozen=True)
class Generated:
    """The rows of one call, in its order. ``tokens_per_second`` is of all rows together, after their prompts. ``task``
    wrote them, None for the base."""

    rows: tuple[GeneratedRow, ...]
    tokens_per_second: float | None
    task: str | None = None

    @property
    def text(self) -> str | None:
        """Of the first row, which is the only one of one prompt."""
        return self.rows[0].text
