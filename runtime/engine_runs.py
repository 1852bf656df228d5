"""The runs that answer a request: one of a whole engine, or one of each segment of a chain until all rows have left; or
several of either, where there are more rows than an engine takes at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ..bucket import Bucket
from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.entries.tensor_spec import TensorSpec
from .answer import ExitRows, Padding, RowRun
from .choosing.candidates import Choice
from .engines.pool import EnginePool
from .exits.choice import OpenExits
from .inputs.arrays import Array, InputChecker, cut_back
from .request import RequestContext


class EngineRuns(NamedTuple):
    """What came back, owned by the caller: ``outputs`` by name, and the routes, ``routing``, where they
    were asked for.

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


def run_whole(
    context: RequestContext, engine: EngineEntry, pool: EnginePool, inputs: InputChecker, outputs: Sequence[TensorSpec]
) -> EngineRuns:
    """Runs one engine, on inputs filled up to its bucket where that is static; ``outputs`` are cut back to the
    request's own shape.

    Raises InputError for an input that cannot be padded, BundleError if the engine cannot be opened.
    """
    dispatched = perf_counter()
    # Opened first: only then is it known that the engine has the shapes for which memory is taken.
    runner = pool.get(engine) if context.task is None else pool.of_task(engine, context.task)
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
    run = chain.answer(context.feeds, context.shape, exits.policy)
    ended = perf_counter()
    if exits.monitor is not None:
        exits.monitor.add(run.index)
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
        {name: _joined([(rows, one.outputs[name]) for rows, one in done]) for name in parts[0].outputs},
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


def _joined(parts: Sequence[tuple[Array, Array]]) -> Array:
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
        name: _joined([(rows, getattr(one, name)) for rows, one in exits])
        for name in ("index", "layer", "entropy", "flops", "share")
    }
    return ExitRows(**columns, policy=exits[0][1].policy)
