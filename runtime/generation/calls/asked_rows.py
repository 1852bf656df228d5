"""The rows that a call generates: prompts, stops and capacity checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....bundle.entries.generation_entry import GenerationEntry
from ....errors import InputError
from ..sampling import Ids, Sampling
from .options import Options
from .prompts import Prompts
from .row import Row, RowOptions
from .session import Session

# A capacity that nobody asked for is a multiple of this.
_ROUNDED_TO = 64


class AskedRows(NamedTuple):
    """``each`` row, with room for ``capacity`` tokens, behind prompts of up to ``prompt_tokens`` that an encoder
    reads."""

    each: list[Row]
    capacity: int
    prompt_tokens: int
    sampling: Sampling


def asked_rows(
    prompts: Prompts,
    entry: GenerationEntry,
    asked: Options,
    session: Session | None,
    prompt: object,
    messages: object,
) -> AskedRows:
    """Those of a prompt, of several, or of a chat. Raises InputError for what does not fit."""
    continued, sources = prompts.behind_encoder(prompts.tokens(prompt, messages))
    if session is not None and len(continued) > session.rows:
        raise InputError(f"session: {len(continued)} prompts, it has {session.rows} rows; open one with more")
    if asked.draft is not None and len(continued) > 1:
        raise InputError(f"draft: tokens are drafted for one row, got {len(continued)} prompts; call once for each")
    stops = asked.stops_beside(entry.end_ids)
    if beyond := [token for token in stops.ids if token >= entry.vocabulary]:
        raise InputError(
            f"stop: token id {min(beyond)!r:.80}; expected one below {entry.vocabulary}, the vocabulary of this model"
        )
    if stops.strings:
        prompts.require_tokenizer()
    capacity = _capacity(entry, session, asked, continued)
    tokens = asked.tokens_for(max(map(len, continued)), capacity, f"the capacity of {capacity}")
    sampling = asked.sampling(entry.sampling or {})
    options = RowOptions(tokens, sampling, stops, frozenset(entry.end_ids), asked.logprobs)
    each = [
        Row(number, ids, options, prompts.tokenizer, source)
        for number, (ids, source) in enumerate(zip(continued, sources, strict=True))
    ]
    return AskedRows(each, capacity, max((len(ids) for ids in sources if ids is not None), default=0), sampling)


def require_positions(entry: GenerationEntry, capacity: int) -> None:
    """Raises InputError for a capacity beyond the positions of the model, or the largest cache of its engines."""
    if capacity > entry.most_tokens:
        most = f"{entry.most_tokens}, the {_limited_by(entry)}"
        raise InputError(f"capacity: expected at most {most}, got {capacity}")


def _capacity(entry: GenerationEntry, session: Session | None, asked: Options, rows: Sequence[Ids]) -> int:
    """Tokens that every row has room for: the session's, what was asked for, or what is needed, rounded up."""
    longest = max(map(len, rows))
    if session is not None:
        if asked.capacity is not None:
            raise InputError("capacity: the session has one already; ask for it when you open the session")
        return session.capacity
    if asked.capacity is not None:
        require_positions(entry, asked.capacity)
        return asked.capacity
    wanted = longest + asked.tokens_for(longest, entry.most_tokens, f"the {entry.most_tokens} {_limited_by(entry)}")
    return min(-(-wanted // _ROUNDED_TO) * _ROUNDED_TO, entry.most_tokens)


def _limited_by(entry: GenerationEntry) -> str:
    """What the longest text follows from."""
    return "positions of this model" if entry.most_tokens == entry.positions else "tokens of its largest cache"
