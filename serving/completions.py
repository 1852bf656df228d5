"""Generated text as OpenAI has it: ``/v1/completions`` and ``/v1/chat/completions``, whole or as server-sent events."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from time import time
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..argument_types import number_within
from ..errors import InputError
from ..runtime.generation.options import GenerationRequest
from ..runtime.generation.row import Piece, Row
from .app import OWN_HEADERS, Handler, Service
from .embeddings import OPENAI, flag, texts_of
from .generating import Generation
from .served import Reply, Served, stated

_PASSED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "task")
_CHOICE = ("budget", "submodel", "memory_mb", "task")
_READ = ("stream", "stream_options", "stop", "max_tokens", "max_completion_tokens", "logprobs", "deadline_ms", "user")
# Options that are not offered here may have the value that leaves them out.
_NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "store": False,
}
# As OpenAI has it of a completion that states none; a chat has what the runtime gives.
_COMPLETION_TOKENS, _MOST_PROMPTS = 16, 64
# The most likely tokens that are shown beside each, at most; letters tokenised in the time in which one is written.
_MOST_LIKELY, _MOST_LIKELY_OF_CHAT, _LETTERS = 5, 20, 4
_FINISH = {"end": "stop", "stop": "stop", "length": "length", None: None}


async def completions(service: Service, request: Request) -> Response:
    return await _generated(service, request, is_chat=False)


async def chat_completions(service: Service, request: Request) -> Response:
    return await _generated(service, request, is_chat=True)


async def _generated(service: Service, request: Request, is_chat: bool) -> Response:
    document = {name: value for name, value in (await service.document(request)).items() if value is not None}
    served = service.model(document.get("model"))
    entry = served.model.bundle.manifest.generation
    if entry is None:
        raise InputError(f"model {served.name}: this model does not generate text")
    if entry.prompt_array is not None:
        raise InputError(
            f"model {served.name}: generates behind an array, {entry.prompt_array.name}, which servers do not take; "
            "use `nestforge generate --inputs`, or `generate` in Python"
        )
    streams, with_usage = flag(document, "stream", False), _with_usage(document)
    found = stated(request.scope[OWN_HEADERS], document)
    if "latency_ms" in found:
        raise InputError("latency_ms: is of one run; a generation takes deadline_ms")
    terms = service.terms(request, found.get("deadline_ms"), document.get("user"))
    choice = {name: found[name] for name in _CHOICE if name in found}
    asked = _asked(document, found.get("task"), is_chat)
    given = asked.prompt if asked.messages is None else [value for one in asked.messages for value in one.values()]
    letters = service.letters("messages" if is_chat else "prompt", map(str, given or ()))
    with service.counted(request, served):
        generation = await service.generating[served.name].begin(asked, letters, choice, terms)
    of = _Answer(service, request, served, generation, is_chat)
    try:
        if not streams:
            return await service.unless_gone(request, asyncio.ensure_future(of.whole()))
        events = of.events(with_usage)
        # A refusal has its status.
        first = asyncio.ensure_future(anext(events))
        return _Stream(await service.unless_gone(request, first), events, generation)
    except BaseException:
        generation.close()
        raise


class _Stream(StreamingResponse):
    """``events`` behind the ``first``, which are closed when the client goes away."""

    def __init__(self, first: bytes, events: AsyncIterator[bytes], of: Generation) -> None:
        async def each() -> AsyncIterator[bytes]:
            yield first
            async for one in events:
                yield one

        super().__init__(each(), media_type="text/event-stream")
        self._of = of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._of.close()


class _Answer:
    """A generation as one of the two forms has it."""

    def __init__(
        self, service: Service, request: Request, served: Served, generation: Generation, is_chat: bool
    ) -> None:
        self._service, self._request, self._served, self._generation = service, request, served, generation
        self._is_chat = is_chat
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time()),
            "model": served.name,
        }

    async def whole(self) -> Response:
        """The answer when all rows have ended. Raises as Generation.each."""
        pieces: dict[Row, list[Piece]] = {row: [] for row in self._generation.rows}
        size = 0
        async for row, piece in self._each():
            pieces[row].append(piece)
            if piece.log_probabilities is not None:
                size += _LETTERS * (1 + len(piece.log_probabilities.top))

        def shown() -> Response:
            choices = [self._choice(row, own, 0, "message") for row, own in pieces.items()]
            return JSONResponse({**self._head, "choices": choices, "usage": self._usage})

        return await self._service.desk.aside(size, shown)

    async def events(self, with_usage: bool) -> AsyncIterator[bytes]:
        """The answer as it comes. Raises as Generation.each before the first token, and says so in the stream later."""
        head = {**self._head, "object": "chat.completion.chunk"} if self._is_chat else self._head
        usage = {"usage": None} if with_usage else {}
        letters: dict[Row, int] = {}
        try:
            async for row, piece in self._each():
                before = letters.get(row)
                letters[row] = (before or 0) + len(piece.text)
                if piece.text or piece.finish or piece.log_probabilities or before is None:
                    choice = self._choice(row, [piece], before or 0, "delta")
                    if self._is_chat and before is not None:
                        del choice["delta"]["role"]
                    yield _event({**head, "choices": [choice], **usage})
        except Exception as failure:
            if not letters:
                raise
            problem = self._service.problem(failure, self._served.name)
            yield _event(OPENAI.body(problem.kind, str(problem), 500))
            return
        if with_usage:
            yield _event({**head, "choices": [], "usage": self._usage})
        yield b"data: [DONE]\n\n"

    async def _each(self) -> AsyncIterator[tuple[Row, Piece]]:
        """The tokens of all rows, and then what is counted of them; headers say who generated the first one."""
        service, request, served, generation = self._service, self._request, self._served, self._generation
        reply = None
        try:
            with service.counted(request, served):
                async for row, piece in generation.each():
                    if reply is None:
                        reason = row.result().runs[0].reason
                        reply = Reply({}, piece.submodel, reason, None, 0, None)
                        request.scope["nestforge.reply"] = reply
                    yield row, piece
        finally:
            generation.close()
        assert reply is not None
        service.answered(request, reply, generation.terms)

    @property
    def _usage(self) -> dict[str, int]:
        prompts = sum(row.prompt_tokens for row in self._generation.rows)
        tokens = sum(len(row.tokens) - len(row.prompt) for row in self._generation.rows)
        return {"prompt_tokens": prompts, "completion_tokens": tokens, "total_tokens": prompts + tokens}

    def _choice(self, row: Row, pieces: Sequence[Piece], start: int, name: str) -> dict[str, Any]:
        """``pieces`` of a row, behind ``start`` letters, in a chat as ``name``; with the last one, who generated
        them."""
        text, finish = "".join(piece.text for piece in pieces), _FINISH[pieces[-1].finish]
        said = {name: {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice: dict[str, Any] = {
            "index": row.number,
            **said,
            "logprobs": self._logprobs(pieces, start),
            "finish_reason": finish,
        }
        if finish is not None:
            choice["nestforge"] = [
                {"submodel": run.submodel, "tokens": run.tokens, "reason": run.reason} for run in row.result().runs
            ]
        return choice

    def _logprobs(self, pieces: Sequence[Piece], start: int) -> dict[str, Any] | None:
        tokens, offsets = [], []
        for piece in pieces:
            found = piece.log_probabilities
            if found is not None:
                ids = [(piece.token, found.token), *found.top]
                tokens.append([(*self._served.written(token), value) for token, value in ids])
                offsets.append(start)
            start += len(piece.text)
        if not tokens:
            return None
        if self._is_chat:
            each = [[{"token": text, "bytes": own, "logprob": value} for text, own, value in one] for one in tokens]
            return {"content": [{**first, "top_logprobs": top} for first, *top in each]}
        return {
            "tokens": [text for (text, _, _), *_ in tokens],
            "token_logprobs": [value for (_, _, value), *_ in tokens],
            "top_logprobs": [{text: value for text, _, value in top} for _, *top in tokens],
            "text_offset": offsets,
        }


def _event(found: Any) -> bytes:
    return b"data: " + json.dumps(found, separators=(",", ":")).encode() + b"\n\n"


def _with_usage(document: Mapping[str, Any]) -> bool:
    given = document.get("stream_options") or {}
    if not isinstance(given, dict) or not given.keys() <= {"include_usage"}:
        raise InputError(f"stream_options: expected an object with include_usage alone, got {given!r:.80}")
    if given and not document.get("stream"):
        raise InputError("stream_options: is of a stream; leave it out, or state stream: true")
    return flag(given, "include_usage", False)


def _asked(document: Mapping[str, Any], task: str | None, is_chat: bool) -> GenerationRequest:
    """The request of a body, but for its choice of a submodel. Raises InputError for what is not served, by name."""
    own = ("messages", "top_logprobs") if is_chat else ("prompt",)
    for name, value in document.items():
        if name in ("model", *own, *_READ, *_PASSED, *_CHOICE):
            continue
        if name not in _NEUTRAL:
            raise InputError(f"{name[:80]}: not served; leave it out")
        if value != _NEUTRAL[name]:
            raise InputError(f"{name}: not served but for {json.dumps(_NEUTRAL[name])}, got {value!r:.80}")
    options = {name: document[name] for name in _PASSED if name in document} | {"task": task}
    options.setdefault("seed", secrets.randbelow(2**63))
    if len(limits := [document[name] for name in ("max_tokens", "max_completion_tokens") if name in document]) > 1:
        raise InputError("max_tokens, max_completion_tokens: expected one of them")
    options["max_tokens"] = limits[0] if limits else None if is_chat else _COMPLETION_TOKENS
    if document.get("stop", []) != []:
        options["stop"] = texts_of("stop", document["stop"])
    if is_chat:
        messages = document.get("messages")
        if not isinstance(messages, list):
            raise InputError(f"messages: expected a list of messages, got {messages!r:.80}")
        options["messages"] = list(map(_message, messages))
        if flag(document, "logprobs", False):
            options["logprobs"] = document.get("top_logprobs", 0)
        elif "top_logprobs" in document:
            raise InputError("top_logprobs: is of logprobs; state logprobs: true, or leave it out")
    else:
        options["prompt"], options["logprobs"] = texts_of("prompt", document.get("prompt")), document.get("logprobs")
        if len(options["prompt"]) > _MOST_PROMPTS:
            raise InputError(f"prompt: {len(options['prompt'])} texts; expected at most {_MOST_PROMPTS} in a request")
    most, name = (_MOST_LIKELY_OF_CHAT, "top_logprobs") if is_chat else (_MOST_LIKELY, "logprobs")
    if options.get("logprobs") is not None:
        options["logprobs"] = number_within(name, options["logprobs"], int, {"min": 0, "max": most})
    return GenerationRequest(**options)


def _message(given: Any) -> Any:
    """A message, whose content may be texts in parts; the chat template checks it."""
    if not isinstance(given, dict):
        raise InputError(f"messages: expected objects with role and content, got {given!r:.80}")
    parts = given.get("content")
    if not isinstance(parts, list):
        return given
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise InputError("messages: expected content that is a text, or parts of type text alone")
    return {**given, "content": "".join(part["text"] for part in parts)}


ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
]
