"""Text from a bundle: ``model.generate(prompt, ...)``, and sessions that keep their cache between calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, Literal, overload

from ....errors import InputError, SelectionError
from ...bundle.entries.generation_entry import GenerationEntry
from ...bundle.open_bundle import Bundle
from ...engines.contract.residency import Residency
from ...engines.memory import MemoryCap
from ...engines.needs import residencies_for
from ...engines.onnxruntime_gpu.provider import Provider
from ...engines.pool import EnginePool
from ...inputs.text import TextEncoder
from ..sampling import Ids
from .drafters import drafting_for, smaller_engines
from .gains import Gains
from .generated import Generated
from .generation import Generation
from .options import Options, whole_number
from .pace import Pace
from .prompts import Prompt, Prompts
from .row import Row, RowOptions
from .session import Session
from .step_times import StepTimes
from .writers import writers

# A capacity that nobody asked for is a multiple of this, and one of a session has room for so many.
_ROUNDED_TO = 64
_SESSION_CAPACITY = 2048


class Generator:
    """The engines of a bundle that keep a cache, opened by the first call that needs them. Thread-safe; each session
    serves one call at a time."""

    def __init__(
        self,
        bundle: Bundle,
        encoder: Callable[[], TextEncoder],
        threads: int,
        residency: Residency | Literal["auto"] = "auto",
        provider: Provider | None = None,
        affinity: Sequence[int] = (),
        memory: MemoryCap | None = None,
    ) -> None:
        """``encoder`` gives the bundle's; ``memory`` also counts what else is open."""
        self._bundle, self._encoder, self._threads, self._residency = bundle, encoder, threads, residency
        self._provider, self._affinity, self._memory = provider, affinity, memory
        self._lock = threading.Lock()
        self._pool: EnginePool | None = None
        self._times = StepTimes()
        self._gains = Gains(self._times)
        self._known_prompts: Prompts | None = None
        self._is_closed = False

    @overload
    def __call__(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        session: Session | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> Generated: ...

    @overload
    def __call__(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        session: Session | None = None,
        stream: Literal[True],
        **options: Any,
    ) -> Generation: ...

    def __call__(
        self,
        prompt: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        session: Session | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Generated | Generation:
        """Continues a prompt (a text, or its token ids), or several, a row each; or a chat,
        ``[{"role": ..., "content": ...}]``, by the model's chat template.

        ``options`` are those of Options. With ``stream`` an iterator of Pieces, which runs as it is iterated. In a
        ``session`` prompt ``n`` is the whole text of row ``n``, earlier turns included, and what it has in common with
        what is there is not computed again. Raises InputError, SelectionError, or a BundleError if an engine cannot be
        opened; all that the request can be refused for before any work.
        """
        started = perf_counter()
        asked, entry = Options.of(options), self._entry()
        if session is not None and not session.is_of(entry):
            raise InputError("session: of another model; open one with the session() of this model")
        prompts = self._prompts(entry)
        rows, sources = prompts.behind_encoder(prompts.tokens(prompt, messages))
        tokenizer = prompts.tokenizer
        stops = asked.stops_beside(entry.end_ids)
        if beyond := [token for token in stops.ids if token >= entry.vocabulary]:
            raise InputError(
                f"stop: token id {min(beyond)}; expected one below {entry.vocabulary}, the vocabulary of this model"
            )
        if stops.strings and tokenizer is None:
            raise InputError(f"bundle {self._bundle.path}: has no tokenizer; stop at token ids instead of texts")
        capacity = self._capacity(entry, session, asked, rows)
        tokens = asked.tokens_for(max(map(len, rows)), capacity, f"the capacity of {capacity}")
        with ExitStack() as own:  # closes a session of this call's, should it fail
            if session is None:
                longest = max((len(ids) for ids in sources if ids is not None), default=0)
                session = own.enter_context(self._session(entry, len(rows), capacity, longest))
            elif len(rows) > session.rows:
                raise InputError(f"session: {len(rows)} prompts, it has {session.rows} rows; open one with more")
            admitted = self._opened(entry, 0).residencies.keys()
            engines, reason = writers(self._bundle.manifest, asked, admitted, len(rows), session.bytes)
            sampling = asked.sampling(entry.sampling or {})
            drafting = None
            if asked.draft is not None:
                if len(rows) > 1:
                    raise InputError(
                        f"draft: tokens are drafted for one row, got {len(rows)} prompts; call once for each"
                    )
                may_draft = smaller_engines(self._bundle.manifest, engines[0], admitted)
                drafting = drafting_for(
                    self._bundle.manifest, asked, sampling, engines[0], may_draft, session, self._gains
                )
                reason += f"; {drafting.reason}"
            pace = Pace(engines, reason, asked.promise, self._times, started)
            options_of_rows = RowOptions(tokens, sampling, stops, frozenset(entry.end_ids), asked.logprobs)
            each = [
                Row(number, ids, options_of_rows, tokenizer, source)
                for number, (ids, source) in enumerate(zip(rows, sources, strict=True))
            ]
            is_named = asked.submodel is not None or asked.budget is not None
            generation = Generation(session, each, pace, own.pop_all().close, is_named, drafting)
        return generation if stream else generation.finish()

    def session(self, rows: int = 1, capacity: int | None = None) -> Session:
        """A cache of ``rows`` rows, with room for ``capacity`` tokens in each, by default 2048 or as many as the model
        takes. Raises InputError, or SelectionError where the memory cap does not allow it."""
        entry = self._entry()
        if entry.encoder is not None:
            raise InputError(
                "session: this model reads a prompt whole, with an encoder, so that nothing of one could be kept for "
                "the next; generate without a session"
            )
        count = whole_number("rows", rows, 1)
        given = min(_SESSION_CAPACITY, entry.positions) if capacity is None else whole_number("capacity", capacity, 2)
        return self._session(entry, count, given, 0)

    def _session(self, entry: GenerationEntry, count: int, given: int, prompt_tokens: int) -> Session:
        """Of ``count`` rows with a capacity of ``given`` tokens, behind prompts of up to ``prompt_tokens`` that an
        encoder reads. Raises as ``session``."""
        most = max(engine.bucket.batch for engine in entry.engines)
        if count > most:
            raise InputError(f"rows: expected at most {most}, which the engines take at once, got {count}")
        _require_positions(entry, given)
        kept = sum(4 * 2 * layer.heads * layer.size for layer in entry.layers) * count * (given + prompt_tokens)
        size = kept + 4 * entry.vocabulary * count * len(entry.engines)  # each that is bound has logits of its own
        pool = self._opened(entry, size)
        if self._memory is not None:
            self._memory.take_cache(size)
        given_back = _nothing if self._memory is None else partial(self._memory.give_cache, size)
        try:
            return Session(entry, pool.get, count, given, given_back, prompt_tokens)
        except MemoryError as failure:
            given_back()
            raise SelectionError(
                f"a cache of {size / 1e6:.1f} MB: this host has no memory for it; ask for fewer rows or a smaller "
                "capacity"
            ) from failure

    @property
    def open_submodels(self) -> tuple[str, ...]:
        """Of those that have an engine open, as large ones come first."""
        entry, pool = self._bundle.manifest.generation, self._pool
        if entry is None or pool is None:
            return ()
        open_ones = {engine.submodel for engine in entry.engines if pool.is_open(engine)}
        return tuple(one.id for one in self._bundle.manifest.largest_first if one.id in open_ones)

    def require_chats(self) -> None:
        """Raises InputError where the model has no chat template."""
        self._prompts(self._entry()).require_chats()

    def tokens(self, text: str) -> list[int]:
        """The tokens of a prompt, with those that the tokenizer adds. Raises InputError."""
        (ids,) = self._prompts(self._entry()).tokens(text, None)
        return [int(token) for token in ids]

    def token_text(self, token: int) -> str:
        """How the tokenizer writes one token; its number where there is no tokenizer, or no such token."""
        tokenizer = self._prompts(self._entry()).tokenizer
        text = None if tokenizer is None else tokenizer.id_to_token(token)
        return str(token) if text is None else str(text)

    def close(self) -> None:
        """Releases every engine."""
        with self._lock:
            self._is_closed = True
            if self._pool is not None:
                self._pool.close()

    def _entry(self) -> GenerationEntry:
        entry = self._bundle.manifest.generation
        if entry is None:
            raise InputError(
                f"bundle {self._bundle.path}: has no engines that generate; compile the language model with --generate"
            )
        if self._provider is not None:
            raise InputError(
                f"generate: engines that keep a cache run on the processor, not with provider {self._provider.name}; "
                "load with provider cpu"
            )
        if self._residency == "mapped":
            raise InputError("generate: engines that keep a cache are shared or packed, not mapped; load them so")
        return entry

    def _prompts(self, entry: GenerationEntry) -> Prompts:
        """One of them, since it keeps the chat template that it has compiled."""
        with self._lock:
            if self._known_prompts is None:
                self._known_prompts = Prompts(self._bundle, entry, self._encoder)
            return self._known_prompts

    def _opened(self, entry: GenerationEntry, cache_bytes: int) -> EnginePool:
        """The engines that may be open, decided at the first call under what the cap leaves beside ``cache_bytes``."""
        with self._lock:
            if self._pool is None:
                left = None
                if self._memory is not None:
                    left = self._memory.left_mb - cache_bytes / 1e6
                    if left <= 0:
                        raise SelectionError(
                            f"memory_mb: a cache of {cache_bytes / 1e6:.1f} MB leaves nothing for engines; ask for "
                            "fewer rows, a smaller capacity or fewer tokens, or raise the cap"
                        )
                residencies = residencies_for(self._bundle, entry.every_engine, left, self._residency)
                self._pool = EnginePool(self._bundle, residencies, self._threads, None, self._affinity, self._memory)
                if self._is_closed:
                    self._pool.close()
            return self._pool

    def _capacity(self, entry: GenerationEntry, session: Session | None, asked: Options, rows: Sequence[Ids]) -> int:
        """Tokens that every row has room for: the session's, what was asked for, or what is needed, rounded up."""
        longest = max(map(len, rows))
        if session is not None:
            if asked.capacity is not None:
                raise InputError("capacity: the session has one already; ask for it when you open the session")
            return session.capacity
        if asked.capacity is not None:
            _require_positions(entry, asked.capacity)
            return asked.capacity
        wanted = longest + asked.tokens_for(longest, entry.positions, f"the {entry.positions} positions of this model")
        return min(-(-wanted // _ROUNDED_TO) * _ROUNDED_TO, entry.positions)


def _require_positions(entry: GenerationEntry, capacity: int) -> None:
    if capacity > entry.positions:
        raise InputError(f"capacity: expected at most {entry.positions}, the positions of this model, got {capacity}")


def _nothing() -> None:
    """Where nothing is to be given back."""
