"""Text from a bundle: ``model.generate(prompt, ...)``, and sessions that keep their cache between calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Literal, NamedTuple

from ...argument_types import checked, number_within, with_fields_of
from ...bundle.device_files.device_file import this_host
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.generation_entry import GenerationEntry
from ...bundle.open_bundle import Bundle
from ...errors import InputError, SelectionError
from ...ownership import Owner
from ..engines.memory import MemoryCap
from ..engines.onnxruntime_gpu.provider import Provider
from ..engines.residency import Residency
from ..graphs.task_tensors import TaskTensors
from ..inputs.text import TextEncoder
from .admitted import AdmittedEngines, longer_prompt_bytes
from .batch import Batch
from .cache_memory import memory_for, session_bytes
from .draft_gains import DraftCalibration, Gains, JudgedDraft, RunTime, StepTimes
from .drafting import drafting_for, most_checked, smaller_engines
from .generation import Generation, Loop
from .options import AUTO, GenerationRequest
from .pace import Pace, candidates
from .prompts import Prompts, requested_rows
from .row import Generated, Row
from .session import Session

# Capacity of a session by default, in tokens.
_SESSION_CAPACITY = 2048


class Generator:
    """The KV-cache engines of a bundle, opened by the first call that needs them. Thread-safe; each session serves one
    call at a time."""

    def __init__(
        self,
        bundle: Bundle,
        encoder: Callable[[], TextEncoder],
        threads: int,
        residency: Residency | Literal["auto"] = "auto",
        provider: Provider | None = None,
        affinity: Sequence[int] = (),
        memory: MemoryCap | None = None,
        tensors_of: Callable[[str], TaskTensors] | None = None,
        merged: Mapping[str, Generator] = MappingProxyType({}),
    ) -> None:
        """``encoder`` gives the bundle's, ``tensors_of`` those of a task; ``memory`` also counts what else is open.
        ``merged`` are the generators of tasks, by name, that have engines of their own."""
        self._tensors_of, self._merged = tensors_of, merged
        self._bundle, self._encoder, self.threads, self._residency = bundle, encoder, threads, residency
        self._provider = provider
        self._engines = AdmittedEngines(bundle, threads, residency, provider, affinity, memory)
        self._lock = threading.Lock()
        self._times = StepTimes()
        self._gains = Gains(self._times)
        self._starts_anew = True
        self._known_prompts: Prompts | None = None

    @with_fields_of(GenerationRequest)
    def __call__(self, request: GenerationRequest) -> Generated:
        """Generates the rows of a request. Raises InputError, SelectionError, or a BundleError if an engine cannot be
        opened; all that the request can be refused for before any work."""
        owner = Owner()
        try:
            return self._begun(owner, request).finish()
        except BaseException:
            owner.is_over = True
            raise

    @with_fields_of(GenerationRequest)
    def stream(self, request: GenerationRequest) -> Generation:
        """The tokens of a request as they come: an iterator of Pieces, which runs as it is iterated. Raises as a
        call."""
        owner = Owner()
        try:
            return self._begun(owner, request)
        except BaseException:
            owner.is_over = True
            raise

    def session(self, rows: int = 1, capacity: int | None = None, task: str | None = None) -> Session:
        """A KV cache of ``rows`` rows, with room for ``capacity`` tokens in each, by default 2048 or as many as the
        model takes, for generations of ``task``, or of the base. Raises InputError, or SelectionError where the memory
        cap does not allow it."""
        if (merged := self._of_task(task)) is not self:
            return merged.session(rows, capacity, task)
        entry = self._entry()
        if entry.encoder is not None:
            raise InputError(
                "session: this model reads a prompt whole, with an encoder, so that nothing of one could be used for "
                "the next; generate without a session"
            )
        count = number_within("rows", rows, int, {"min": 1})
        given = min(_SESSION_CAPACITY, entry.most_tokens)
        if capacity is not None:
            given = number_within("capacity", capacity, int, {"min": 2})
        size = session_bytes(entry, count, given)
        user = Owner()
        try:
            self._engines.use(user)
            self._engines.admit(entry, size)
            return self._session(Owner(), entry, size, count, given, task=task)
        finally:
            user.is_over = True

    def rows(self, request: GenerationRequest, most_tokens: int) -> list[Row]:
        """The rows of a request, of which nothing is computed, for a batch of ``most_tokens``. Raises InputError."""
        entry = self._of_task(request.task)._entry()
        room = replace(request, capacity=min(most_tokens, entry.most_tokens))
        return requested_rows(self._prompts(entry), entry, room).each

    def batch_engines(
        self, request: GenerationRequest, most_rows: int, most_tokens: int
    ) -> tuple[Sequence[EngineEntry], str]:
        """The engines of a ``batch``, the largest first, and why that one. Raises as ``batch``."""
        if (merged := self._of_task(request.task)) is not self:
            return merged.batch_engines(request, most_rows, most_tokens)
        entry, user = self._entry(), Owner()
        rows, capacity, prompt_tokens = _room(entry, most_rows, most_tokens)
        size = session_bytes(entry, rows, capacity, prompt_tokens) + longer_prompt_bytes(entry, prompt_tokens)
        try:
            self._engines.use(user)
            admitted = self._engines.admit(entry, size)
            proven = None if request.task is None else self._tensors(request.task).submodels
            return candidates(self._bundle.manifest, request, admitted, rows, size, proven)
        finally:
            user.is_over = True

    def batch(self, request: GenerationRequest, most_rows: int, most_tokens: int) -> Batch:
        """Room for rows that come and go, of ``most_tokens`` each with the prompt, or as many of either as engines
        take, by the submodels that ``request`` leaves, which has no prompt. Raises as a call does before any work."""
        if (merged := self._of_task(request.task)) is not self:
            return merged.batch(request, most_rows, most_tokens)
        entry, owner = self._entry(), Owner()
        engines, _ = self.batch_engines(request, most_rows, most_tokens)
        try:
            admission = self._admit(owner, entry, request, *_room(entry, most_rows, most_tokens))
            return Batch(admission.session, engines, self._times, owner)
        except BaseException:
            owner.is_over = True
            raise

    @property
    def open_submodels(self) -> tuple[str, ...]:
        """Submodels that have an engine open, the largest first."""
        entry = self._bundle.manifest.generation
        if entry is None:
            return ()
        open_ones = {engine.submodel for engine in entry.engines if self._engines.is_open(engine)}
        return tuple(one.id for one in self._bundle.manifest.largest_first if one.id in open_ones)

    def require_chats(self) -> None:
        """Raises InputError where the model has no chat template."""
        self._prompts(self._entry()).require_chats()

    def tokens(self, text: str) -> list[int]:
        """The tokens of a prompt, with the ones that the tokenizer adds. Raises InputError."""
        (ids,) = self._prompts(self._entry()).tokens(text, None)
        return [int(token) for token in ids]

    @checked
    def token_text(self, token: int) -> str:
        """How the tokenizer writes one token; its number where there is no tokenizer, or no such token."""
        tokenizer = self._prompts(self._entry()).tokenizer
        text = None if tokenizer is None or not 0 <= token < 2**32 else tokenizer.id_to_token(int(token))
        return str(token) if text is None else str(text)

    def learned(self) -> tuple[list[RunTime], list[JudgedDraft]]:
        """Times of runs of one row, and how much of each draft was accepted, in this process."""
        return self._gains.found(self._entry().generators)

    def close(self) -> None:
        """Releases every engine."""
        self._engines.close()
        for own in self._merged.values():
            own.close()

    def _entry(self) -> GenerationEntry:
        entry = self._bundle.manifest.generation
        if entry is None:
            raise InputError(
                f"bundle {self._bundle.path}: has no engines that generate; compile the model with `generate=True`"
            )
        if self._provider is not None and not self._provider.generates(entry):
            raise InputError(
                f"generate: provider {self._provider.name} does not run these KV-cache engines; use provider cuda with "
                "a bundle for backend tensorrt, whose graphs it takes, or provider cpu"
            )
        if self._residency == "mapped":
            raise InputError("generate: KV-cache engines are shared or packed, not mapped; load them so")
        return entry

    def _prompts(self, entry: GenerationEntry) -> Prompts:
        """One of them, since it keeps the chat template that it has compiled."""
        with self._lock:
            if self._known_prompts is None:
                self._known_prompts = Prompts(self._bundle, entry, self._encoder)
            return self._known_prompts

    def _begun(self, owner: Owner, request: GenerationRequest) -> Generation:
        """The generation of ``request``; ``owner`` has what it takes. Raises as a call does before any work."""
        started, session = perf_counter(), request.session
        if session is not None and session.task != request.task:
            raise InputError(
                f"session: its keys are those of {_named(session.task)}, the request is for {_named(request.task)}; "
                "open one for each"
            )
        return self._of_task(request.task)._generation(owner, request, started)

    def _generation(self, owner: Owner, request: GenerationRequest, started: float) -> Generation:
        """As ``_begun``, of a call that began at ``started`` (``perf_counter``, seconds)."""
        manifest, entry = self._bundle.manifest, self._entry()
        if request.session is not None and not request.session.is_of(entry):
            raise InputError("session: of another model; open one with the session() of this model")
        rows = requested_rows(self._prompts(entry), entry, request)
        with ExitStack() as own:  # closes the session of this call, should it fail
            admission = self._admit(owner, entry, request, len(rows.each), rows.capacity, rows.prompt_tokens)
            if request.session is None:
                own.enter_context(admission.session)
            proven = None if request.task is None else self._tensors(request.task).submodels
            engines, reason = candidates(manifest, request, admission.admitted, len(rows.each), admission.bytes, proven)
            if self._bundle.merged is not None:
                reason += f"; task {request.task} is merged into its weights"
            drafting = None
            if request.draft is not None and admission.may_draft:
                if request.draft == AUTO:
                    self._start_from_calibration(entry)
                smaller = smaller_engines(manifest, engines[0], admission.admitted)
                drafting = drafting_for(
                    manifest, request, rows.sampling, engines[0], smaller, admission.session, self._gains
                )
                reason += f"; {drafting.reason}"
            elif request.draft is not None:
                reason += f"; draft {AUTO}: nothing drafted, the memory cap has no room for the logits of checks"
            pace = Pace(engines, reason, request, self._times, started)
            is_named = request.submodel is not None or request.budget is not None
            self._engines.take_prompt(longer_prompt_bytes(entry, rows.prompt_tokens), rows.prompt_tokens)
            ended = ExitStack()
            generation = Generation(Loop(admission.session, rows.each, pace, owner, ended.close, is_named, drafting))
            ended.push(own.pop_all())
        return generation

    def _admit(
        self,
        owner: Owner,
        entry: GenerationEntry,
        request: GenerationRequest,
        count: int,
        capacity: int,
        prompt_tokens: int,
    ) -> _Admission:
        """Engines admitted, and memory counted, until ``owner`` is over; where there is no session, one for this call.
        Raises as ``session``."""
        session = request.session
        size = 0 if session else session_bytes(entry, count, capacity, prompt_tokens)
        prompt_bytes = longer_prompt_bytes(entry, prompt_tokens)
        uncounted = self._engines.uncounted(prompt_bytes)
        check_bytes = 4 * entry.vocabulary * most_checked(request)
        may_draft = True
        self._engines.use(owner)
        try:
            admitted = self._engines.admit(entry, size + uncounted + check_bytes)
            self._engines.take(owner, check_bytes, "logits of drafted tokens", "draft fewer tokens")
        except SelectionError:
            if request.draft != AUTO:
                raise
            may_draft = False
            admitted = self._engines.admit(entry, size + uncounted)
        if session is None:
            session = self._session(owner, entry, size, count, capacity, prompt_tokens, request.task)
        most = entry.cache_bytes(session.rows, session.capacity) + entry.source_bytes(session.rows, prompt_tokens)
        cache_bytes = max(session.bytes, most)  # it may grow
        return _Admission(session, admitted, cache_bytes + prompt_bytes, may_draft)

    def _session(
        self,
        owner: Owner,
        entry: GenerationEntry,
        size: int,
        count: int,
        given: int,
        prompt_tokens: int = 0,
        task: str | None = None,
    ) -> Session:
        """A cache of ``size`` bytes, closed when ``owner`` is over; ``count`` rows have a capacity of ``given`` tokens,
        behind prompts of up to ``prompt_tokens`` that an encoder reads. Raises as ``session``."""
        opened = partial(self._engines.of_task, task=None if task is None else self._tensors(task))
        memory = None
        try:
            self._engines.take(owner, size, "a cache", "ask for fewer rows, a smaller capacity or fewer tokens")
            memory = memory_for(entry, count, given, prompt_tokens, self._provider)
            return Session(entry, opened, count, given, memory, owner, task)
        except BaseException as failure:
            owner.is_over = True
            if memory is not None:
                memory.close()
            if isinstance(failure, MemoryError):
                raise SelectionError(
                    f"a cache of {size / 1e6:.1f} MB: this host has no memory for it; ask for fewer rows or a smaller "
                    "capacity"
                ) from failure
            raise

    def _of_task(self, task: str | None) -> Generator:
        """The generator of a task that has engines of its own, else this."""
        return self._merged.get(task, self) if isinstance(task, str) else self

    def _tensors(self, task: str) -> TaskTensors:
        if self._tensors_of is None:
            raise SelectionError(f"no task {task!r:.80} in bundle {self._bundle.path}")
        return self._tensors_of(task)

    def _start_from_calibration(self, entry: GenerationEntry) -> None:
        """Takes this host's calibration of drafts, once. Raises BundleError where it cannot be read."""
        with self._lock:
            if self._starts_anew:
                kept = DraftCalibration.read(self._bundle)
                found = None if kept is None else kept.of(this_host(), self.threads)
                if found is not None:
                    self._gains.start_from(found, entry.generators)
                self._starts_anew = False


class _Admission(NamedTuple):
    """Resources of a call: its session, the ids of engines that may be open, and the ``bytes`` of what its submodels
    need beside themselves. Without ``may_draft`` no drafted tokens can be checked."""

    session: Session
    admitted: Set[str]
    bytes: int
    may_draft: bool


def _room(entry: GenerationEntry, most_rows: int, most_tokens: int) -> tuple[int, int, int]:
    """Rows, capacity of each and tokens of a prompt that an encoder reads, of a batch."""
    prompt_tokens = 0 if entry.encoder is None else min(most_tokens, entry.encoder.positions)
    rows = min(most_rows, max(engine.bucket.batch for engine in entry.engines))
    return rows, min(most_tokens, entry.most_tokens), prompt_tokens


def _named(task: str | None) -> str:
    return "the base" if task is None else f"task {task}"
