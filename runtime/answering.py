"""How a chosen submodel answers: by one run of its whole engine, by one of each segment of a chain until all rows have
left, or by several of either, where there are more rows than an engine takes at once."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ..bucket import Bucket
from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.entries.tensor_spec import TensorSpec
from ..bundle.open_bundle import Bundle
from ..errors import InputError, SelectionError
from .answer import Answer, ExitRows, Limit, Padding, RowRun, Timings
from .candidates import Choice
from .engines.onnxruntime_gpu.provider import Provider
from .engines.runner import EnginePool
from .exits.choice import OFF, Drift, ExitChoice, ExitChooser, OpenExits, RequestedExits
from .inputs.arrays import Array, InputChecker, cut_back
from .request import Request, RequestContext
from .tasks import Tasks


class EngineRuns(NamedTuple):
    """Result, owned by the caller: ``outputs`` by name, and the routes, ``routing``, where they
    were requested.

    ``engine`` ran, the first of a chain. Inputs of ``shape`` were brought to ``filled``. Opening engines took
    ``open_ms``, running them ``run_ms``, until ``ended`` (``perf_counter``, seconds). ``runs`` are the several that
    this is of, if it is. ``is_first``: an engine had not run before since it was opened.
    """

    engine: EngineEntry
    outputs: Mapping[str, Array]
    shape: Bucket
    filled: Bucket
    open_ms: float
    run_ms: float
    ended: float
    exits: ExitRows | None = None
    routing: Mapping[str, Array] | None = None
    runs: tuple[RowRun, ...] = ()
    is_first: bool = False

    @property
    def padding(self) -> Padding | None:
        return Padding(self.shape, self.filled) if self.shape != self.filled else None


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
        exit_choice = self.exit_choice(context.request, engine, context.exits)
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
            outputs=runs.outputs if context.cut is None else context.cut.applied(runs.outputs),
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
            dimensions=None if context.cut is None else context.cut.dimensions,
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
        exit_choice = self.exit_choice(context.request, choice.engine, context.exits)
        return exit_choice is not None and exit_choice.open is not None

    def exit_choice(
        self, request: Request, engine: EngineEntry, exits: RequestedExits | None = None
    ) -> ExitChoice | None:
        """Which exits are open, or None for a model that has none. Raises SelectionError where they cannot be had."""
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


def run_whole(
    context: RequestContext, engine: EngineEntry, pool: EnginePool, inputs: InputChecker, outputs: Sequence[TensorSpec]
) -> EngineRuns:
    """Runs one engine, on inputs filled up to its bucket where that is static; ``outputs`` are cut back to the
    request's own shape.

    Raises InputError for an input that cannot be padded, BundleError if the engine cannot be opened.
    """
    dispatched = perf_counter()
    # Opened first: only then is it known that the engine has the shapes for which memory is taken.
    runner = pool.of_task(engine, context.task)
    opened = perf_counter()
    shape, feeds = inputs.own_shape(context.shape, engine.bucket), context.feeds
    run_at = engine.bucket.filled(shape)
    if run_at is not shape:
        feeds = inputs.filled(feeds, run_at)
    filled = perf_counter()
    returned = runner.run(feeds, context.routing)
    ended = perf_counter()
    arrays, routing = returned, None
    if context.routing:
        arrays, decided = returned[: len(outputs)], returned[len(outputs) :]
        routing = {entry.name: array for entry, array in zip(engine.routing or (), decided, strict=True)}
    if run_at is not shape:
        arrays = cut_back(arrays, outputs, shape)
    return EngineRuns(
        engine,
        {spec.name: array for spec, array in zip(outputs, arrays, strict=True)},
        shape,
        run_at,
        open_ms=1e3 * (opened - dispatched),
        run_ms=1e3 * (ended - filled),
        ended=ended,
        routing=routing,
        is_first=pool.runs_first(engine),
    )


def run_chain(context: RequestContext, whole: EngineEntry, pool: EnginePool, exits: OpenExits) -> EngineRuns:
    """Runs the segments of a submodel; what a row costs is also given as a share of a row of its ``whole`` engine.

    Raises as ``ExitChain.run`` does.
    """
    chain = exits.chain
    dispatched = perf_counter()
    run = exits.answer(context.feeds, context.shape)
    ended = perf_counter()
    largest = run.buckets[0]
    engine = chain.engine(0, largest)
    share = run.flops / max(1, whole.row_flops(context.shape.sequence))
    return EngineRuns(
        engine,
        {chain.entry.logits: run.logits, chain.entry.entropy: run.entropy},
        context.shape,
        Bucket(sum(bucket.batch for bucket in run.buckets), largest.sequence),
        open_ms=run.open_ms,
        run_ms=1e3 * (ended - dispatched) - run.open_ms,
        ended=ended,
        exits=ExitRows(run.index, run.layer, run.entropy, run.flops, share, exits.policy),
        is_first=pool.runs_first(engine),
    )


def run_rows(
    context: RequestContext,
    inputs: InputChecker,
    choices: Sequence[tuple[Array, Choice]],
    run: Callable[[RequestContext, EngineEntry], EngineRuns],
) -> EngineRuns:
    """Runs some rows after the other: the numbers of those of each ``run``, and the choice for it.

    A row of text is run with the steps of the longest in its run. Raises as ``run`` does.
    """
    done: list[tuple[Array, EngineRuns]] = []
    for rows, choice in choices:
        longest = context.shape.sequence
        if context.lengths is not None:
            longest = max(1, *(context.lengths[row] for row in rows.tolist()))
        feeds = inputs.taken(context.feeds, rows, longest)
        done.append((rows, run(context._replace(feeds=feeds, shape=Bucket(len(rows), longest)), choice.engine)))
    parts = [one for _, one in done]
    return EngineRuns(
        parts[0].engine,
        {name: joined([(rows, one.outputs[name]) for rows, one in done]) for name in parts[0].outputs},
        _all_rows([one.shape for one in parts]),
        _all_rows([one.filled for one in parts]),
        open_ms=sum(one.open_ms for one in parts),
        run_ms=sum(one.run_ms for one in parts),
        ended=perf_counter(),
        exits=_all_exits(done),
        runs=tuple(RowRun(rows, one.engine.id, one.padding, one.run_ms) for rows, one in done),
        is_first=any(one.is_first for one in parts),
    )


def _all_rows(shapes: Sequence[Bucket]) -> Bucket:
    return Bucket(sum(shape.batch for shape in shapes), max(shape.sequence for shape in shapes))


def joined(parts: Sequence[tuple[Array, Array]]) -> Array:
    """Arrays ``[n, ...]`` of rows as one in the order of these rows, 0 where those of other rows are larger."""
    count = sum(len(rows) for rows, _ in parts)
    sizes = map(max, zip(*(array.shape[1:] for _, array in parts), strict=True))
    whole = np.zeros((count, *sizes), parts[0][1].dtype)
    for rows, array in parts:
        place: tuple[Any, ...] = (rows, *map(slice, array.shape[1:]))
        whole[place] = array
    return whole


def _all_exits(done: Sequence[tuple[Array, EngineRuns]]) -> ExitRows | None:
    exits = [(rows, one.exits) for rows, one in done if one.exits is not None]
    if not exits:
        return None
    columns: dict[str, Any] = {
        name: joined([(rows, getattr(one, name)) for rows, one in exits])
        for name in ("index", "layer", "entropy", "flops", "share")
    }
    return ExitRows(**columns, policy=exits[0][1].policy)


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
