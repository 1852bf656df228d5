"""A bundle ready to answer: a call runs dispatch -> fill -> run -> cut back, or a chain."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from time import perf_counter
from types import MappingProxyType
from typing import Literal

from ..argument_types import checked, option, stated
from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.entries.tensor_spec import TensorSpec
from ..bundle.manifest import BudgetEntry
from ..bundle.open_bundle import Bundle
from ..errors import InputError, SelectionError
from ..ownership import Owner
from ..profiles.precision import Precision
from ..profiles.probe_host import usable_cores
from .answer import Answer
from .answering import Answering
from .candidates import Candidate, Choice
from .description import SubmodelInfo, described, described_as_html
from .dimensions import Cut, cut_to, paired, required
from .dispatcher import Dispatcher
from .engines.latencies import host_latencies
from .engines.memory import MemoryCap
from .engines.onnxruntime_gpu.provider import Provider
from .engines.residency import Residency
from .engines.runner import EnginePool
from .exits.choice import Drift, ExitChoice, RequestedExits
from .generation.generator import Generator
from .generation.session import Session
from .graphs.task_tensors import TaskTensors
from .in_flight import InFlight, LoadEstimate
from .inputs import options
from .inputs.arrays import Array, InputChecker
from .inputs.text import Text
from .request import Request, RequestContext, Texts
from .tasks import Tasks, packed


class ElasticModel:
    """Every submodel of a bundle behind one call. A context manager; thread-safe."""

    def __init__(
        self,
        bundle: Bundle,
        residencies: Mapping[str, Residency],
        threads: int,
        provider: Provider | None = None,
        affinity: Sequence[int] = (),
        residency: Residency | Literal["auto"] = "auto",
        memory: MemoryCap | None = None,
        merged: Mapping[str, Bundle] = MappingProxyType({}),
    ) -> None:
        """``residency`` and ``memory`` are what was requested: engines that generate have none in ``residencies``.
        ``merged`` are tasks that answer by engines of their own, see ``merged_bundles``."""
        self.bundle = bundle
        self.residencies = residencies
        self.threads = threads
        manifest = bundle.manifest
        self._inputs, self.texts = InputChecker(manifest.inputs), Texts(bundle)
        known = host_latencies(bundle, threads, provider is not None)
        dispatcher = partial(Dispatcher, latencies=known.latencies, elsewhere=known.elsewhere, threads=threads)
        self._dispatcher = dispatcher(manifest, residencies)
        of = {engine.id: engine.submodel for engine in manifest.engines}
        # Requests that name no submodel are answered by one that was trained with their dimensions.
        self._by_dimensions = {
            number: dispatcher(manifest, {id_: how for id_, how in residencies.items() if of[id_] in submodels})
            for number, submodels in paired(manifest).items()
            if any(of[id_] in submodels for id_ in residencies)
        }
        self._pool = EnginePool(bundle, residencies, threads, provider, affinity, memory)
        self._merged = {name: EnginePool(one, packed(one), threads, None, affinity) for name, one in merged.items()}
        self.tasks = Tasks(bundle, self._pool, self._merged, dispatcher)
        generator = partial(Generator, encoder=self.texts.encoder, threads=threads, affinity=affinity)
        own = {name: generator(one, residency="packed", tensors_of=self._task_tensors) for name, one in merged.items()}
        # Called: ``model.generate("Once upon a time", max_tokens=64)``.
        self.generate = generator(
            bundle,
            residency=residency,
            provider=provider,
            memory=memory,
            tensors_of=self._task_tensors,
            merged=own,
        )
        self._answering = Answering(bundle, self._pool, self.tasks, self._inputs, provider)
        # With fewer threads than cores several runs proceed at full speed.
        self._in_flight = InFlight(max(1.0, usable_cores() / threads))

    @stated
    def __call__(
        self,
        inputs: Mapping[str, Array] | str | Sequence[Text],
        *,
        budget: str | None = options.BUDGET,
        latency_ms: float | None = options.LATENCY_MS,
        memory_mb: float | None = options.MEMORY_MB,
        submodel: str | None = options.SUBMODEL,
        deadline_ms: float | None = options.DEADLINE_MS,
        exits: RequestedExits | None = option(
            "Early exits: off; a calibrated policy, by name; or entropy thresholds in nats, one for all exits or one "
            "for each but the last. Default: the bundle's policy, else the model's own gate.",
            metavar="off|NAME|TAU[,TAU...]",
        ),
        truncate: bool = options.TRUNCATE,
        routing: bool = option("Also the routes that the model chose, such as the tokens of each expert.", False),
        prompt: str | None = options.PROMPT,
        prompt_name: str | None = options.PROMPT_NAME,
        task: str | None = options.TASK,
        dimensions: int | None = options.DIMENSIONS,
    ) -> Answer:
        """Answers one request: arrays by input name, or a text, or a list of texts, or of pairs (tuples) for a model
        that was trained on pairs.

        At most one of: a named ``budget``; a ``submodel``; limits (``memory_mb``, and ``latency_ms`` or
        ``deadline_ms``). Without any the largest submodel answers. ``latency_ms`` limits what the run takes alone,
        ``deadline_ms`` counts what this model is answering for other threads too. A limit in time that no figure keeps
        is refused once a run has shown the same. An input smaller than its bucket is padded, which the answer says.
        ``exits`` may be an ``ExitPolicy``; without a policy or gate, or with a limited latency, the whole engine
        answers. For a ``task`` only submodels on which it was proven are chosen. An embedding cut to ``dimensions`` is
        brought to length 1 again where the model brings it there. Raises InputError, SelectionError, or a
        BundleError if an engine cannot be opened.
        """
        started = perf_counter()
        request = Request(budget, submodel, latency_ms, memory_mb, deadline_ms)
        truncated: tuple[int, ...] = ()
        lengths: tuple[int, ...] | None = None
        before = ""
        cut = None if dimensions is None else cut_to(self.bundle.manifest, dimensions)
        tensors = None if task is None else self.tasks.open(task).tensors
        if type(inputs) is dict or isinstance(inputs, Mapping):
            if truncate:
                raise InputError("truncate: applies to text only; cut the arrays yourself")
            if prompt is not None or prompt_name is not None:
                raise InputError("prompt: applies to text only; its tokens belong into the arrays")
            feeds = inputs
        elif isinstance(inputs, bytes | bytearray | memoryview):
            raise InputError(f"expected arrays by input name, or text as str, got {type(inputs).__name__}; decode it")
        else:
            dispatcher, limits = self._dispatcher_of(task), request if truncate else Request()
            longest = partial(dispatcher.longest_sequence, request=limits)  # no text is refused by the encoder
            encoded, before = self.texts.encode(inputs, longest, truncate, prompt, prompt_name)
            feeds, truncated, lengths = encoded.feeds, encoded.truncated, encoded.lengths
        encoded_at = perf_counter()
        shape = self._inputs.sizes_of(feeds)
        context = RequestContext(
            request,
            exits,
            routing,
            feeds,
            shape,
            truncated,
            before,
            started,
            encoded_at,
            Owner(),
            tensors,
            lengths,
            cut,
        )
        try:
            try:
                choice = self._admit(context)
            except SelectionError as failure:
                refusal = failure
            else:
                return self._run(context, choice)
            return self._tried(context, refusal)
        finally:
            context.owner.is_over = True

    def choose(
        self,
        batch: int,
        sequence: int = 1,
        *,
        budget: str | None = None,
        latency_ms: float | None = None,
        memory_mb: float | None = None,
        submodel: str | None = None,
        deadline_ms: float | None = None,
        task: str | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Choice:
        """The engine that would answer ``batch`` rows of ``sequence`` steps now, or of ``lengths`` each, and why;
        nothing runs. Raises as a call does."""
        request = Request(budget, submodel, latency_ms, memory_mb, deadline_ms)
        dispatcher = self._dispatcher_of(task)
        if deadline_ms is None:
            return dispatcher.choose(request, batch, sequence, lengths)
        return dispatcher.choose_in_time(request, batch, sequence, self._in_flight.load(), lengths=lengths)

    def candidates(
        self,
        request: Request,
        batch: int,
        sequence: int,
        *,
        task: str | None = None,
        dimensions: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Sequence[Candidate]:
        """The engines that may answer such a request, with what they take, for a queue before this model: see
        Dispatcher.candidates. Raises as a call does."""
        cut = None if dimensions is None else cut_to(self.bundle.manifest, dimensions)
        return self._dispatcher_for(request, task, cut).candidates(request, batch, sequence, lengths)

    def exits_of(self, request: Request, engine: EngineEntry) -> ExitChoice | None:
        """Which exits such a request may leave at where the submodel of ``engine`` answers it; None for a model without
        any. Raises as a call does."""
        return self._answering.exit_choice(request, engine)

    def longest_sequence(self, batch: int, submodel: str | None = None) -> int:
        """The longest sequence that any engine takes for ``batch`` rows, or any of ``submodel`` if it takes so many.

        Raises InputError beyond every bucket.
        """
        return self._dispatcher.longest_sequence(batch, Request(submodel=submodel))

    def prompt(self, prompt: str | None = None, prompt_name: str | None = None) -> str:
        """Prompt before a text of a request with these arguments; empty for nothing. Raises InputError."""
        return self.texts.prompt(prompt, prompt_name)

    @checked
    def token_counts(self, texts: Sequence[str], prompt: str | None = None) -> list[int]:
        """How many tokens each text has for this model behind ``prompt`` (None is the default one), with the tokens
        that its tokenizer adds. Raises InputError."""
        return self.texts.token_counts(texts, prompt)

    def session(self, rows: int = 1, capacity: int | None = None, task: str | None = None) -> Session:
        """A cache that ``generate`` keeps between calls; see Generator.session."""
        return self.generate.session(rows, capacity, task)

    @cached_property
    def submodels(self) -> tuple[SubmodelInfo, ...]:
        """Those that may answer here, the largest first."""
        return described(self.bundle.manifest, self.residencies)

    @property
    def budgets(self) -> tuple[BudgetEntry, ...]:
        """The named budgets, each with the submodel that was chosen for it, and why."""
        return self.bundle.manifest.budgets

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The arrays of a request, by name, dtype and dimensions."""
        return self.bundle.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The arrays of an answer."""
        return self.bundle.manifest.outputs

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Those of the submodels that may answer here."""
        return tuple(dict.fromkeys(one.precision for one in self.submodels))

    def drift(self) -> Mapping[str, Drift]:
        """By calibrated policy, how the exits that answered since loading compare with the calibration's; of those
        with enough rows. The first time that one drifts, the logger ``nestforge`` warns."""
        return self._answering.drift()

    def open_engines(self, submodels: Collection[str] | None = None) -> None:
        """Opens every engine that has a residency, or those of ``submodels``, and the tokenizer, so that no request
        waits for them."""
        if self.bundle.manifest.text is not None:
            # A model with an input that no text feeds takes arrays alone.
            with suppress(InputError):
                self.texts.encoder()
        for pool in (self._pool, *self._merged.values()):
            for engine in pool.bundle.manifest.engines:
                if engine.id in pool.residencies and (submodels is None or engine.submodel in submodels):
                    pool.get(engine)

    def close(self) -> None:
        """Releases every engine; the model cannot be used afterwards."""
        for pool in (self._pool, *self._merged.values()):
            pool.close()
        self.generate.close()
        self._answering.close()

    def __enter__(self) -> ElasticModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ElasticModel({self.bundle!r}, {self.threads} threads)"

    def _repr_html_(self) -> str:
        return described_as_html(repr(self), self.bundle.manifest, self.submodels)

    def _admit(self, context: RequestContext) -> Choice:
        """The choice for a request, which is in flight from here on."""
        request, shape, dispatcher = context.request, context.shape, self._dispatcher_for(*context.chooses)
        if request.deadline_ms is None:
            choice = dispatcher.choose(request, shape.batch, shape.sequence, context.lengths)
            self._require_cut(context, choice)
            self._in_flight.enter(context.owner, choice.latency_ms)
            return choice

        def in_time(load: LoadEstimate) -> tuple[Choice, float]:
            spent_ms = 1e3 * (perf_counter() - context.started)
            choice = dispatcher.choose_in_time(request, shape.batch, shape.sequence, load, spent_ms, context.lengths)
            self._require_cut(context, choice)
            return choice, choice.latency_ms

        due = context.started + request.limit("deadline_ms") / 1e3
        return self._in_flight.admit(context.owner, due, in_time)

    def _run(self, context: RequestContext, choice: Choice) -> Answer:
        """The answer of ``choice`` to a request that is in flight until then; what its run took is learnt from."""
        self._inputs.check_values(context.feeds)
        answer = self._answering.answer(context, choice)
        is_whole = answer.exits is None
        at_full_speed = self._in_flight.leave(context.owner, counts=is_whole and not answer.first_run)
        if at_full_speed and is_whole:
            if choice.runs:
                for (_, one), run in zip(choice.runs, answer.runs, strict=True):
                    one.ran(run.run_ms, perf_counter())
            else:
                choice.ran(answer.timings.run, perf_counter())
        return answer

    def _tried(self, context: RequestContext, refusal: SelectionError) -> Answer:
        """A request that figures alone refuse, answered if a run within its limit in time proves them wrong.

        Raises ``refusal`` where runs have shown the same before, or requests are in flight; SelectionError where they
        do so now.
        """
        request, shape = context.request, context.shape
        busy = self._in_flight.load().remaining_ms
        dispatcher = self._dispatcher_for(*context.chooses)
        choice = None if busy else dispatcher.to_try(request, shape.batch, shape.sequence, context.lengths)
        if choice is None or context.is_late or self._answering.leaves_early(context, choice):
            raise refusal
        # A first run shows little, so once more after it; with a deadline that time is gone.
        for _ in range(2 if choice.is_new and request.deadline_ms is None else 1):
            self._in_flight.enter(context.owner, choice.latency_ms)
            answer = self._run(context, choice)
            took = answer.timings.run
            if not context.is_late and (request.latency_ms is None or took <= request.latency_ms):
                return answer
        raise SelectionError(f"{refusal}; {choice.engine.submodel} was tried and took {took:.3g} ms")

    def _dispatcher_for(self, request: Request, task: str | None, cut: Cut | None) -> Dispatcher:
        """That of its task or, where it names no submodel, of its dimensions."""
        if cut is None or task is not None or request.budget is not None or request.submodel is not None:
            return self._dispatcher_of(task)
        return self._by_dimensions.get(cut.dimensions, self._dispatcher)

    def _require_cut(self, context: RequestContext, choice: Choice) -> None:
        """Raises InputError for a submodel that was not trained with the dimensions requested."""
        if context.cut is not None:
            submodel = self.bundle.manifest.submodel(choice.engine.submodel)
            required(*context.cut, submodel=submodel)

    def _dispatcher_of(self, task: str | None) -> Dispatcher:
        return self._dispatcher if task is None else self.tasks.open(task).dispatcher

    def _task_tensors(self, task: str) -> TaskTensors:
        return self.tasks.open(task).tensors
