"""The runs that answer a request: one of a whole engine, or one of each segment of a chain until all rows have left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

from ..bucket import Bucket
from .answer import ExitRows
from .bundle.entries.engine_entry import EngineEntry
from .bundle.entries.tensor_spec import TensorSpec
from .engines.pool import EnginePool
from .exits.choice import OpenExits
from .inputs.arrays import Array
from .inputs.check_inputs import InputChecker, cut_back
from .request import RequestContext


class EngineRuns(NamedTuple):
    """What came back, owned by the caller: ``outputs`` by name, and the routes, ``routing``, where they
    were asked for.

    ``engine`` ran, the first of a chain. Inputs of ``shape`` were brought to ``filled``. Opening engines took
    ``open_ms``, running them ``run_ms``, until ``ended`` (``perf_counter``, seconds).
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
    )


def run_chain(context: RequestContext, whole: EngineEntry, exits: OpenExits) -> EngineRuns:
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
    share = run.flops / max(1, whole.row_flops(context.shape.sequence))
    return EngineRuns(
        chain.engine(0, largest),
        {chain.entry.logits: run.logits, chain.entry.entropy: run.entropy},
        context.shape,
        Bucket(sum(bucket.batch for bucket in run.buckets), largest.sequence),
        open_ms=run.open_ms,
        run_ms=1e3 * (ended - dispatched) - run.open_ms,
        ended=ended,
        exits=ExitRows(run.index, run.layer, run.entropy, run.flops, share, exits.policy),
    )
