"""The segments of one submodel with their engines, and what those cost relative to each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ...bucket import Bucket
from ...bundle.build_record import Latency
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.entries.exits_entry import ExitsEntry, SegmentEntry
from ...bundle.open_bundle import Bundle
from ...elastic import DEPTH
from ...errors import SelectionError
from ..engines.latencies import as_predicted, latency_at
from ..engines.pool import EnginePool
from ..engines.runner import Runner
from .batch_plan import BatchPlanner, Cost


class Segment:
    """One segment's engines by bucket, and what they cost."""

    def __init__(
        self,
        entry: SegmentEntry,
        engines: Mapping[Bucket, EngineEntry],
        known: Mapping[str, Sequence[Latency]],
        pool: EnginePool,
    ) -> None:
        self.entry = entry
        self.buckets = tuple(sorted(engines))
        self._engines = engines
        self.planner = BatchPlanner(_costs(engines, known, pool))
        self._pool = pool
        # All engines of a bundle are of one backend, so that one of them speaks for all.
        self.device_source = pool.device_source(next(iter(engines.values())))

    def engine(self, shape: Bucket) -> EngineEntry:
        """The engine that runs a batch of exactly ``shape``, one of a batch plan."""
        return self._engines[self.planner.bucket_of(shape)]

    def runner(self, shape: Bucket) -> Runner:
        return self._pool.get(self.engine(shape))


def segments_of(
    bundle: Bundle,
    exits: ExitsEntry,
    submodel: str,
    pool: EnginePool,
    latencies: Sequence[Latency],
    engines: Collection[str] | None,
) -> list[Segment]:
    """The segments of ``submodel`` (its id), in order, on ``engines`` (ids; None is all that can run here).

    Raises SelectionError where one of them is left out.
    """
    depth = bundle.manifest.submodel(submodel).values[DEPTH][0]
    usable = {engine.id for engine in pool.runnable()} if engines is None else engines
    known = _latencies_by_file(bundle, latencies)
    return [
        Segment(entry, _engines(bundle, submodel, entry.name, usable), known, pool)
        for entry in exits.segments
        if entry.layer <= depth
    ]


def _engines(bundle: Bundle, submodel: str, segment: str, usable: Collection[str]) -> dict[Bucket, EngineEntry]:
    every = [engine for engine in bundle.manifest.engines if (engine.submodel, engine.segment) == (submodel, segment)]
    engines = {engine.bucket: engine for engine in reversed(every) if engine.id in usable}
    missing = [engine.id for engine in every if engine.bucket not in engines]
    if missing or not every:
        raise SelectionError(
            f"submodel {submodel}: its exits cannot be used here, engine {(*missing, segment)[0]} is left out "
            "(by memory_mb, for want of its backend, or as a range on a GPU); its whole engine can answer"
        )
    return engines


def _latencies_by_file(bundle: Bundle, latencies: Sequence[Latency]) -> dict[str, list[Latency]]:
    """Engines of one file are one engine, whichever of them was measured."""
    files = {engine.id: engine.file for engine in bundle.manifest.engines}
    known: dict[str, list[Latency]] = {}
    for latency in latencies:
        if latency.engine in files:
            known.setdefault(files[latency.engine], []).append(latency)
    return known


def _costs(
    engines: Mapping[Bucket, EngineEntry], known: Mapping[str, Sequence[Latency]], pool: EnginePool
) -> dict[Bucket, Cost]:
    """Milliseconds at a shape by bucket, all measured or all predicted, else tokens."""
    measured, predicted = {}, {}
    for bucket, engine in engines.items():
        residency = pool.residencies.get(engine.id)
        for latency in sorted(known.get(engine.file, ()), key=lambda one: one.residency == residency):
            predicted[bucket] = _cost(as_predicted(latency))
            if latency.measured_p50_ms is not None:
                measured[bucket] = _cost(latency)
    for costs in (measured, predicted):
        if len(costs) == len(engines) and all(cost(bucket.largest) > 0 for bucket, cost in costs.items()):
            return costs
    return dict.fromkeys(engines, lambda shape: float(shape.tokens))


def _cost(latency: Latency) -> Cost:
    milliseconds = latency_at(latency)
    return lambda shape: milliseconds(shape).p50_ms
