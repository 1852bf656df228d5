"""One row while it is generated, and what a call gives back: tokens as they come, and the rows that they make."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from ...bundle.entries.engine_entry import EngineEntry
from ..inputs.arrays import Array
from .pace import Chosen
from .sampling import (
    Drafted,
    Ids,
    Logits,
    LogProbabilities,
    Sampler,
    Sampling,
    draw_draft,
    log_probabilities,
    pick_checked,
)
from .text_stream import Stops, TextStream

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
    """How many tokens in turn one submodel generated, and why it did when it began."""

    submodel: str
    tokens: int
    reason: str


@dataclass(frozen=True)
class DraftedTokens:
    """Proposals of a draft: ``drafted`` tokens, checked in ``runs`` runs of the submodel that generates, of which
    ``accepted`` were accepted."""

    draft: str
    runs: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class GeneratedRow:
    """One row. ``tokens`` are all that were picked, also the one that ended it; ``text`` is what they add to the
    prompt, up to the stop, and None where the bundle has no tokenizer. ``finish`` is None where the generation was
    closed before the row ended; ``stop`` is the id or string that ended it. ``runs`` say which submodel generated which
    tokens. ``reused_tokens`` of the ``prompt_tokens`` were in the session's cache; the others took ``prompt_ms``, and
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
    is None for the base."""

    rows: tuple[GeneratedRow, ...]
    tokens_per_second: float | None
    task: str | None = None

    @property
    def text(self) -> str | None:
        """Text of the first row, which is the only one of one prompt."""
        return self.rows[0].text


@dataclass(frozen=True)
class RowOptions:
    """The options of every row of a call: at most ``max_tokens``, where ``stops`` (with the model's own ``end_ids``
    among them) do not end it before. ``logprobs`` asks for the log-probabilities of the tokens and of so many of the
    most likely ones. ``first`` and ``last`` are the tokens at the first place and at that of ``max_tokens``, whatever
    is likely there; ``suppressed`` never come, ``suppressed_first`` not as the first that is not forced."""

    max_tokens: int
    sampling: Sampling
    stops: Stops
    end_ids: Collection[int]
    logprobs: int | None = None
    first: int | None = None
    last: int | None = None
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    def allowed(self, logits: Logits, number: int) -> Logits:
        """``logits`` ``[V]`` of token ``number`` of a row, without those that may not come there."""
        ids = [*self.suppressed, *(self.suppressed_first if number == (self.first is not None) else ())]
        if ids:
            logits = logits.copy()
            logits[ids] = -np.inf
        return logits


class Row:
    """Row ``number`` of a call, behind ``prompt`` ``[T]``; ``tokenizer`` is None where the bundle has none. For an
    encoder-decoder the request's prompt is the ``source``, of ``source_tokens``, and ``prompt`` what its decoder begins
    with."""

    def __init__(
        self,
        number: int,
        prompt: Ids,
        options: RowOptions,
        tokenizer: Any | None,
        source: Array | None = None,
        source_tokens: int = 0,
    ) -> None:
        self.number, self.prompt, self.source = number, prompt, source
        # Length of the request's prompt.
        self.prompt_tokens = len(prompt) if source is None else source_tokens
        self.finish: Finish | None = None
        self.reused_tokens, self.prompt_ms = 0, 0.0
        self.token_ms: list[float] = []
        self._options = options
        self._sampler = Sampler(options.sampling, number)
        self._history = np.concatenate([prompt, np.zeros(options.max_tokens, np.int64)])
        self._count = 0
        self._stream = None if tokenizer is None else TextStream(tokenizer, options.stops, prompt.tolist())
        self._stop: int | str | None = None
        self._pieces: list[str] = []
        self._runs: list[tuple[Chosen, int]] = []  # with the number of its first token
        self._log_probabilities: list[LogProbabilities] = []
        self._drafts: dict[str, DraftedTokens] = {}

    @property
    def tokens(self) -> Ids:
        """The prompt and what was picked, ``[T]``."""
        return self._history[: len(self.prompt) + self._count]

    @property
    def seen(self) -> Ids:
        """``tokens``, behind those that an encoder read."""
        if self.source is None or self.source.dtype.kind == "f":
            return self.tokens
        return np.concatenate([self.source, self.tokens])

    @property
    def last(self) -> int:
        """The token that was picked last."""
        return int(self._history[len(self.prompt) + self._count - 1])

    @property
    def has_begun(self) -> bool:
        """Whether a token was picked."""
        return self._count > 0

    @property
    def tokens_left(self) -> int:
        """How many more tokens may be picked."""
        return self._options.max_tokens - self._count

    def draft(self, logits: Logits, ahead: int) -> Drafted:
        """A draft's token, ``ahead`` places behind the next one, of the ``logits`` ``[V]`` that it computed behind what
        it drafted before. Fewer than ``tokens_left`` can be drafted."""
        end = len(self.prompt) + self._count + ahead
        logits = self._options.allowed(logits, self._count + ahead)
        drafted = draw_draft(self._sampler, logits, self._history[:end])
        self._history[end] = drafted.token  # until the token at its place is picked
        return drafted

    def pick(self, logits: Logits, chosen: Chosen, drafted: Drafted | None = None) -> Piece:
        """The next token, of ``logits`` ``[V]`` that ``chosen`` computed: the ``drafted`` one if it is accepted."""
        end = len(self.prompt) + self._count
        history = self._history[:end]
        forced = self._options.last if self.tokens_left == 1 else None
        if forced is None and not self._count:
            forced = self._options.first
        if forced is not None:
            token = forced
        elif drafted is None:
            token = self._sampler.pick(self._options.allowed(logits, self._count), history)
        else:
            token = pick_checked(self._sampler, self._options.allowed(logits, self._count), history, drafted)
        self._history[end] = token
        if not self._runs or self._runs[-1][0] != chosen:
            self._runs.append((chosen, self._count))
        self._count += 1
        found = None
        if self._options.logprobs is not None:
            found = log_probabilities(logits, token, self._options.logprobs)
            self._log_probabilities.append(found)
        text = self._add(token)
        return Piece(self.number, token, text, chosen.engine.submodel, found, self.finish)

    def continued_by(self, engine: EngineEntry, reason: str) -> Chosen:
        """The choice of ``engine`` for the next token; its reason stays where it computed the one before."""
        before = self._runs[-1][0] if self._runs else None
        return before if before is not None and before.engine is engine else Chosen(engine, reason)

    def checked(self, draft: str, drafted: int, accepted: int) -> None:
        """Counts a run that checked ``drafted`` tokens of ``draft``'s and accepted ``accepted``."""
        before = self._drafts.get(draft, DraftedTokens(draft, 0, 0, 0))
        self._drafts[draft] = DraftedTokens(
            draft, before.runs + 1, before.drafted + drafted, before.accepted + accepted
        )

    def result(self) -> GeneratedRow:
        """The row as far as it has come."""
        starts = [start for _, start in self._runs]
        lengths = [end - start for start, end in zip(starts, [*starts[1:], self._count], strict=False)]
        return GeneratedRow(
            text=None if self._stream is None else "".join(self._pieces),
            tokens=tuple(self.tokens[len(self.prompt) :].tolist()),
            finish=self.finish,
            stop=self._stop,
            runs=tuple(
                Run(chosen.engine.submodel, tokens, chosen.reason)
                for (chosen, _), tokens in zip(self._runs, lengths, strict=True)
            ),
            log_probabilities=None if self._options.logprobs is None else tuple(self._log_probabilities),
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            prompt_ms=self.prompt_ms,
            token_ms=tuple(self.token_ms),
            drafts=tuple(self._drafts.values()),
        )

    def _add(self, token: int) -> str:
        """The text that the token makes certain, all the rest where the row ends with it."""
        text, stream = "", self._stream
        if stream is None:
            self._stop = token if token in self._options.stops.ids else None
        else:
            text = stream.add(token)
            if stream.stopped is None and not self.tokens_left:
                text += stream.finish()
            self._stop = stream.stopped
        if self._stop is not None:
            self.finish = "end" if self._stop in self._options.end_ids else "stop"
        elif not self.tokens_left:
            self.finish = "length"
        if text:
            self._pieces.append(text)
        return text
