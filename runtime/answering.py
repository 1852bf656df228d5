"""How a chosen submodel answers: by its engine, by the segments of its chain, or in several runs of either."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import perf_counter

from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.open_bundle import Bundle
from ..errors import InputError, SelectionError
from .answer import Answer, Limit, Timings
from .choosing.candidates import Choice
from .engine_runs import EngineRuns, run_chain, run_rows, run_whole
from .engines.onnxruntime_gpu.provider import Provider
from .engines.pool import EnginePool
from .exits.choice import OFF, ExitChoice, ExitChooser, OpenExits
from .exits.drift import Drift
from .inputs.arrays import InputChecker
from .request import RequestContext
from .tasks import Tasks


class Answering:
    """Runs what the dispatcher chose on the engines of ``pool`` or, of a task, those that answer it. Thread-safe.

    Raises a BundleError if the bundle's calibration of exits cannot be read.
    """

    def __init__(
        self, bundle: Bundle, pool: EnginePool, tasks: Tasks, inputs: InputChecker, provider: Provider | None
    ) -> None:
        manifest = bundle.manifest
        self._pool, self._tasks, self._inputs, self._provider = pool, tasks, inputs, provider
        self._outputs = manifest.outputs
        self._exits = ExitChooser(bundle, manifest.exits, pool) if manifest.exits else None
        self._latency_budgets = {b.name for b in manifest.budgets if b.limits.latency_ms is not None}

    def answer(self, context: RequestContext, choice: Choice) -> Answer:
        """Answers by the engine chosen, or by its submodel's segments where exits are open.

        Raises InputError for an input that cannot be padded or routes that there are not, SelectionError for exits that
        cannot be had, a BundleError if an engine cannot be opened.
        """
        engine, reasons = choice.engine, [choice.reason]
        pool = self._pool if context.task_name is None else self._tasks.open(context.task_name).pool
        if pool.bundle.merged is not None:
            reasons.append(f"task {context.task_name} is merged into its weights")
        if self._provider is not None:
            reasons.append(f"by ONNX Runtime's provider {self._provider.name}")
        exit_choice = self._exit_choice(context, engine)
        if exit_choice is not None:
            reasons.append(exit_choice.reason)
        opened = None if exit_choice is None else exit_choice.open
        if context.routing:
            _require_routes(engine, choice, opened is not None)

        if choice.runs:
            runs = run_rows(context, self._inputs, choice.runs, partial(self._run, pool=pool, exits=opened))
        else:
            runs = self._run(context, engine, pool, opened)
        return Answer(
            outputs=runs.outputs,
            submodel=engine.submodel,
            engine=runs.engine.id,
            bucket=runs.engine.bucket,
            residency=pool.residencies[runs.engine.id],
            reason="; ".join(reasons),
            padding=runs.padding,
            truncated=context.truncated,
            timings=Timings(
                encode=1e3 * (context.encoded - context.started),
                dispatch=1e3 * (runs.ended - context.encoded) - runs.open_ms - runs.run_ms,
                open=runs.open_ms,
                run=runs.run_ms,
            ),
            exits=runs.exits,
            routing=runs.routing,
            prompt=context.prompt,
            task=context.task_name,
            runs=runs.runs,
            limit=_limit(context, runs.run_ms) if context.request.is_timed else None,
            first_run=runs.is_first,
        )

    def _run(
        self, context: RequestContext, engine: EngineEntry, pool: EnginePool, exits: OpenExits | None
    ) -> EngineRuns:
        """One run of ``engine``, or of the chain whose ``exits`` are open."""
        if exits is None:
            return run_whole(context, engine, pool, self._inputs, self._outputs)
        return run_chain(context, engine, pool, exits)

    def leaves_early(self, context: RequestContext, choice: Choice) -> bool:
        """Whether the segments of a chain would answer, whose runs say nothing of the figures of whole engines."""
        exit_choice = self._exit_choice(context, choice.engine)
        return exit_choice is not None and exit_choice.open is not None

    def _exit_choice(self, context: RequestContext, engine: EngineEntry) -> ExitChoice | None:
        """Which exits are open, or None for a model that has none. Raises SelectionError where they cannot be had."""
        request, exits = context.request, context.exits
        if self._exits is not None:
            limited = request.is_timed or request.budget in self._latency_budgets
            return self._exits.choose(exits, engine.submodel, limited)
        if exits is not None and not (isinstance(exits, str) and exits == OFF):
            raise SelectionError(
                f"exits: this model has no exits to leave at; expected none or 'off', got {exits!r:.80}"
            )
        return None

    def drift(self) -> Mapping[str, Drift]:
        """See ElasticModel.drift."""
        return self._exits.drift() if self._exits else {}

    def close(self) -> None:
        """Lets go of the engines that chains hold; the pool has been closed."""
        if self._exits is not None:
            self._exits.close()


def _limit(context: RequestContext, run_ms: float) -> Limit:
    """The limit in time of a request that has one, as its answer is made."""
    latency_ms, deadline_ms = context.request.latency_ms, context.request.deadline_ms
    if deadline_ms is not None:
        return Limit("deadline_ms", float(deadline_ms), 1e3 * (perf_counter() - context.started))
    assert latency_ms is not None
    return Limit("latency_ms", float(latency_ms), run_ms)


def _require_routes(engine: EngineEntry, choice: Choice, leaves_early: bool) -> None:
    """Raises InputError where a request for routes gets none."""
    if not engine.routing:
        raise InputError(f"routing: engine {engine.id} returns none; ask for its outputs alone")
    if choice.runs:
        raise InputError(f"routing: is of one run, and these rows take {len(choice.runs)}; send fewer at once")
    if leaves_early:
        raise InputError("routing: segments return none; ask with exits='off', or for outputs alone")
