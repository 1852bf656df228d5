"""Prompts as tokens, of texts, tokens themselves or a chat; and the rows of a request that continue them, checked
before any work."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...bundle.entries.generation_entry import NO_DRAFTS, GenerationEntry
from ...bundle.open_bundle import Bundle
from ...errors import InputError
from ..inputs.arrays import Array, InputChecker
from ..inputs.text import TextEncoder, open_tokenizer
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

    @cached_property
    def tokenizer(self) -> Any | None:
        """None where the bundle has none."""
        bundle, file = self._bundle, self._entry.tokenizer
        if file is None:
            return None if bundle.manifest.text is None else self._encoder().tokenizer
        bundle.require_hashes(file)
        with bundle.held(file):
            return open_tokenizer(bundle.file(file))

    def tokens(self, prompt: object, messages: object) -> list[Ids]:
        """The rows of a call, each ``[T]``, of either. Raises InputError for none, for an empty one, or for tokens that
        are not of the vocabulary."""
        if (prompt is None) == (messages is None):
            raise InputError("generate: expected either a prompt or messages")
        if messages is not None:
            text = self._chat.render(messages)  # type: ignore[arg-type]  # which checks them
            return [self._checked("prompt 0", self._require_encoder().ids(text, add_special_tokens=False))]
        several = [(f"prompt {number}", one) for number, one in enumerate(_several(prompt))]
        return [self._checked(what, self._ids(what, one)) for what, one in several]

    def rows(self, request: GenerationRequest) -> tuple[list[Ids], list[Array | None]]:
        """Each row's tokens to continue, and its encoder's prompt: of an encoder-decoder the tokens that its decoder
        begins with, and the prompt. Raises InputError for what either does not take, and where nothing says with which
        tokens the decoder begins."""
        encoder, begin = self._entry.encoder, request.decoder_prompt
        if encoder is None:
            if begin is not None:
                raise InputError("decoder_prompt: this model has no encoder; write it into the prompt")
            found = self.tokens(request.prompt, request.messages)
            return found, [None] * len(found)
        if encoder.input is not None:
            if not isinstance(request.prompt, np.ndarray) or request.messages is not None:
                raise InputError(f"prompt: expected a numpy array of {encoder.input.name}, rows first")
            InputChecker([encoder.input]).shape_of({encoder.input.name: request.prompt})
            sources = list(request.prompt)
        else:
            sources = self.tokens(request.prompt, request.messages)
        for number, source in enumerate(sources):
            if (tokens := encoder.tokens_of(source)) > encoder.positions:
                raise InputError(f"prompt {number}: {tokens} tokens, the encoder takes {encoder.positions}; shorten it")
        if begin is None:
            begin = (encoder.start_id,) if encoder.begin_ids is None else encoder.begin_ids
            if not begin:
                raise InputError(
                    f"decoder_prompt: this model begins with {encoder.start_id} and tokens of language and task, and "
                    "the language is not detected; pass them"
                )
        elif isinstance(begin, str):
            if self.tokenizer is None:
                raise InputError(f"bundle {self._bundle.path}: has no tokenizer; pass `decoder_prompt` as token ids")
            begin = self.tokenizer.encode(begin, add_special_tokens=False).ids
        return [self._checked("decoder_prompt", begin)] * len(sources), [*sources]

    def require_tokenizer(self) -> None:
        """Raises InputError where there is none, so that no text can be found in what is generated."""
        if self.tokenizer is None:
            raise InputError(f"bundle {self._bundle.path}: has no tokenizer; stop at token ids instead of texts")

    def require_chats(self) -> None:
        """Raises InputError where there is no chat template, or none that can be read."""
        self._require_encoder()
        _ = self._chat

    def _ids(self, what: str, prompt: object) -> Sequence[object]:
        if isinstance(prompt, str):
            if not prompt:
                raise InputError(f"{what}: empty; there is nothing to continue")
            return self._require_encoder().ids(prompt)
        found = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
        if not isinstance(found, Sequence) or isinstance(found, bytes | bytearray):
            raise InputError(f"{what}: expected a text or a list of token ids, got {prompt!r:.80}")
        return found

    def _checked(self, what: str, ids: Sequence[object]) -> Ids:
        vocabulary = self._entry.vocabulary
        if not ids:
            raise InputError(f"{what}: empty; there is nothing to continue")
        for place, token in enumerate(ids):
            if not isinstance(token, int | np.integer) or isinstance(token, bool) or not 0 <= token < vocabulary:
                raise InputError(
                    f"{what}: token {place} is {token!r:.80}; expected a whole number from 0 to "
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
    continued, sources = prompts.rows(request)
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
    encoder = entry.encoder
    options = RowOptions(
        tokens,
        sampling,
        stops,
        frozenset(entry.end_ids),
        request.logprobs,
        encoder.first_id if encoder and longest == 1 else None,
        encoder.last_id if encoder else None,
        entry.suppressed_ids or (),
        entry.suppressed_first_ids or (),
    )
    read = [encoder.tokens_of(source) if encoder and source is not None else 0 for source in sources]
    each = [
        Row(number, ids, options, prompts.tokenizer, source, of_source)
        for number, (ids, source, of_source) in enumerate(zip(continued, sources, read, strict=True))
    ]
    return RequestedRows(each, capacity, max(read), sampling)


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
