"""Prompts as tokens, of texts, tokens themselves or a chat; and the rows of a request that continue them, checked
before any work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...bundle.entries.generation_entry import NO_DRAFTS, GenerationEntry
from ...bundle.open_bundle import Bundle
from ...errors import InputError
from ..inputs.text import TextEncoder
from .cache_memory import limited_by, require_positions
from .chat import ChatTemplate
from .options import GenerationRequest
from .row import Row, RowOptions
from .sampling import Ids, Sampling

# A capacity that nobody requested is a multiple of this.
_ROUNDED_TO = 64


class Prompts:
    """The prompts of one bundle that generates. Thread-safe."""

    def __init__(self, bundle: Bundle, entry: GenerationEntry, encoder: Callable[[], TextEncoder]) -> None:
        """``encoder`` gives that of the bundle; it is called only where there is a text."""
        self._bundle, self._entry, self._encoder = bundle, entry, encoder

    @property
    def tokenizer(self) -> Any | None:
        """None where the bundle has none."""
        return None if self._bundle.manifest.text is None else self._encoder().tokenizer

    def tokens(self, prompt: object, messages: object) -> list[Ids]:
        """The rows of a call, each ``[T]``, of either. Raises InputError for none, for an empty one, or for tokens that
        are not of the vocabulary."""
        if (prompt is None) == (messages is None):
            raise InputError("generate: expected either a prompt or messages")
        if messages is not None:
            text = self._chat.render(messages)  # type: ignore[arg-type]  # which checks them
            return [self._checked(0, self._require_encoder().ids(text, add_special_tokens=False))]
        return [self._checked(number, self._ids(number, one)) for number, one in enumerate(_several(prompt))]

    def behind_encoder(self, rows: list[Ids]) -> tuple[list[Ids], list[Ids | None]]:
        """Each row's tokens to continue, and its encoder's prompt: of an encoder-decoder the token that its decoder
        begins with, and the prompt. Raises InputError for a prompt that is longer than the encoder takes."""
        encoder = self._entry.encoder
        if encoder is None:
            return rows, [None] * len(rows)
        for number, ids in enumerate(rows):
            if len(ids) > encoder.positions:
                raise InputError(
                    f"prompt {number}: {len(ids)} tokens, the encoder takes {encoder.positions}; shorten it"
                )
        return [np.array([encoder.start_id], np.int64)] * len(rows), list(rows)

    def require_tokenizer(self) -> None:
        """Raises InputError where there is none, so that no text can be found in what is generated."""
        if self._bundle.manifest.text is None:
            raise InputError(f"bundle {self._bundle.path}: has no tokenizer; stop at token ids instead of texts")

    def require_chats(self) -> None:
        """Raises InputError where there is no chat template, or none that can be read."""
        self._require_encoder()
        _ = self._chat

    def _ids(self, number: int, prompt: object) -> Sequence[object]:
        if isinstance(prompt, str):
            if not prompt:
                raise InputError(f"prompt {number}: empty; there is nothing to continue")
            return self._require_encoder().ids(prompt)
        found = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
        if not isinstance(found, Sequence) or isinstance(found, bytes | bytearray):
            raise InputError(f"prompt {number}: expected a text or a list of token ids, got {prompt!r:.80}")
        return found

    def _checked(self, number: int, ids: Sequence[object]) -> Ids:
        vocabulary = self._entry.vocabulary
        if not ids:
            raise InputError(f"prompt {number}: empty; there is nothing to continue")
        for place, token in enumerate(ids):
            if not isinstance(token, int | np.integer) or isinstance(token, bool) or not 0 <= token < vocabulary:
                raise InputError(
                    f"prompt {number}: token {place} is {token!r:.80}; expected a whole number from 0 to "
                    f"{vocabulary - 1}, the vocabulary"
                )
        return np.array(ids, np.int64)

    def _require_encoder(self) -> TextEncoder:
        if self._bundle.manifest.text is None:
            raise InputError(f"bundle {self._bundle.path}: has no tokenizer; pass token ids instead of text")
        return self._encoder()

    @cached_property
    def _chat(self) -> ChatTemplate:
        bundle, file = self._bundle, self._entry.chat_template
        if file is None:
            raise InputError(
                f"bundle {bundle.path}: its model has no chat template; write the chat as a prompt, in the form that "
                "the model was trained on"
            )
        bundle.require_hashes(file)
        with bundle.held(file):
            source = bundle.file(file).read_text(encoding="utf-8", errors="replace")
        return ChatTemplate(source, self._entry.special_tokens or {})


def _several(prompt: object) -> Sequence[object]:
    """One prompt or several, as several."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | Mapping):
        raise InputError(f"prompt: expected a text, token ids, or a list of them, got {prompt!r:.80}")
    if not prompt:
        raise InputError("prompt: empty; there is nothing to continue")
    one = all(isinstance(item, int | np.integer) for item in prompt)
    return [prompt] if one else prompt


class RequestedRows(NamedTuple):
    """``each`` row, with room for ``capacity`` tokens, behind prompts of up to ``prompt_tokens`` that an encoder
    reads."""

    each: list[Row]
    capacity: int
    prompt_tokens: int
    sampling: Sampling


def requested_rows(prompts: Prompts, entry: GenerationEntry, request: GenerationRequest) -> RequestedRows:
    """The rows of a prompt, of several, or of a chat. Raises InputError for what does not fit."""
    continued, sources = prompts.behind_encoder(prompts.tokens(request.prompt, request.messages))
    if request.session is not None and len(continued) > request.session.rows:
        raise InputError(f"session: {len(continued)} prompts, it has {request.session.rows} rows; open one with more")
    if request.draft is not None and entry.states:
        raise InputError(f"draft: {NO_DRAFTS}; leave it out")
    if request.draft is not None and len(continued) > 1:
        raise InputError(f"draft: tokens are drafted for one row, got {len(continued)} prompts; call once for each")
    stops = request.stops_beside(entry.end_ids)
    if beyond := [token for token in stops.ids if token >= entry.vocabulary]:
        raise InputError(
            f"stop: token id {min(beyond)!r:.80}; expected one below {entry.vocabulary}, the vocabulary of this model"
        )
    if stops.strings:
        prompts.require_tokenizer()
    longest = max(map(len, continued))
    capacity = _capacity(entry, request, longest)
    tokens = request.tokens_for(longest, capacity, f"the capacity of {capacity}")
    sampling = request.sampling(entry.sampling or {})
    first, last = (entry.encoder.first_id, entry.encoder.last_id) if entry.encoder else (None, None)
    options = RowOptions(tokens, sampling, stops, frozenset(entry.end_ids), request.logprobs, first, last)
    each = [
        Row(number, ids, options, prompts.tokenizer, source)
        for number, (ids, source) in enumerate(zip(continued, sources, strict=True))
    ]
    return RequestedRows(each, capacity, max((len(ids) for ids in sources if ids is not None), default=0), sampling)


def _capacity(entry: GenerationEntry, request: GenerationRequest, longest: int) -> int:
    """Tokens that every row has room for: the session's, what was requested, or what is needed behind prompts of up to
    ``longest`` tokens, rounded up."""
    if request.session is not None:
        if request.capacity is not None:
            raise InputError("capacity: the session has one already; ask for it when you open the session")
        return request.session.capacity
    if request.capacity is not None:
        require_positions(entry, request.capacity)
        return request.capacity
    wanted = longest + request.tokens_for(longest, entry.most_tokens, f"the {entry.most_tokens} {limited_by(entry)}")
    return min(-(-wanted // _ROUNDED_TO) * _ROUNDED_TO, entry.most_tokens)
