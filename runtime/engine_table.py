"""The engines of a bundle that may run here, and which of them take an input: at once, or its rows in several runs."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..bucket import Bucket
from ..bundle.build_record import Latency
from ..bundle.manifest import Manifest
from ..errors import InputError, SelectionError
from .candidates import Candidate, Engine, Split, by_padding, in_runs, split, stated_latency
from .engines.residency import Residency
from .running_estimate import RunningEstimate

_MAX_DIMENSION = 2**31
# Rows of one request. The plan of a run is small beside the run, but the plans of all are made before the first.
_MAX_ROWS_IN_RUNS = 2**20


class EngineTable:
    """The whole engines of ``residencies``, by submodel, with what they take and need; see Dispatcher.

    ``lengths``, where a method takes them, are the steps of each row without padding; without them every row has
    ``sequence`` of them.
    """

    def __init__(
        self,
        manifest: Manifest,
        residencies: Mapping[str, Residency],
        latencies: Sequence[Latency],
        elsewhere: str | None,
        running: RunningEstimate,
        threads: int = 1,
    ) -> None:
        weights = {entry.id: entry.weight_bytes for entry in manifest.submodels}
        known: dict[str, list[Latency]] = {}
        for each in latencies:
            known.setdefault(each.engine, []).append(each)
        by_submodel: dict[str, list[Engine]] = {entry.id: [] for entry in manifest.submodels}
        self._whole = [engine for engine in manifest.engines if engine.segment is None]
        self._has_rows = all(spec.dims[:1] == ("batch",) for spec in (*manifest.inputs, *manifest.outputs))
        for engine in self._whole:
            if engine.id in residencies:
                stated = stated_latency(known.get(engine.id, ()), residencies[engine.id], elsewhere)
                reads = weights[engine.submodel] if engine.weight_bytes is None else engine.weight_bytes
                memory = reads + engine.private_bytes + engine.activation_bytes
                by_submodel[engine.submodel].append(Engine(engine, stated, memory / 1e6, running, threads))
        for engines in by_submodel.values():
            engines.sort(key=lambda one: (one.entry.bucket.tokens, not one.entry.bucket.is_static, one.entry.bucket))
        self._engines = {entry.id: by_submodel[entry.id] for entry in manifest.largest_first}

    def of_submodel(self, submodel: str, batch: int, sequence: int, lengths: Sequence[int] | None) -> Candidate | None:
        """The engine of ``submodel`` (its id) that pads the input least, and of those the one of the smallest bucket,
        or all the runs that answer it; None where it has no engine that long."""
        shape = Bucket(int(batch), int(sequence))
        engines = by_padding(self._engines[submodel], shape)
        if engines:
            return engines[0].candidate(shape)
        return next(iter(self.in_runs_of([submodel], batch, sequence, lengths)), None)

    def holding(self, batch: int, sequence: int, lengths: Sequence[int] | None) -> list[Candidate]:
        """Per submodel, from the largest down, the engine that pads the input least; behind one of a range also those
        that pad more and take less time or memory all the same. Where no engine takes all rows, what each submodel
        takes for them in runs."""
        shape = Bucket(int(batch), int(sequence))
        found: list[Candidate] = []
        for engines in self._engines.values():
            own: list[Candidate] = []
            for engine in by_padding(engines, shape):
                candidate = engine.candidate(shape)
                if own and own[0].engine.bucket.is_static:
                    break
                if all(candidate.memory_mb < one.memory_mb or candidate.p95_ms < one.p95_ms for one in own):
                    own.append(candidate)
            found += own
        return found or self.in_runs_of(self._engines, batch, sequence, lengths)

    def in_runs_of(
        self, submodels: Iterable[str], batch: int, sequence: int, lengths: Sequence[int] | None
    ) -> list[Candidate]:
        """The figures of all rows in several runs, for each of ``submodels`` that takes the longest row; none where the
        model's arrays are not one row after the other."""
        if not self._has_rows:
            return []
        if batch > _MAX_ROWS_IN_RUNS:
            raise InputError(f"input of {batch} rows: at most {_MAX_ROWS_IN_RUNS} go in runs; send less at once")
        steps = np.full(int(batch), sequence) if lengths is None else np.array(lengths)
        splits: dict[tuple[Bucket, ...], Split] = {}
        found = []
        for submodel in submodels:
            engines = self._engines[submodel]
            buckets = tuple(engine.entry.bucket for engine in engines)
            if steps.max() <= max((bucket.sequence for bucket in buckets), default=0):
                if buckets not in splits:
                    splits[buckets] = split(steps, buckets)
                found.append(in_runs(engines, splits[buckets]))
        return found

    def longest_sequence(self, batch: int, submodel: str | None, limits: Mapping[str, float]) -> int:
        """The longest sequence that an engine, of ``submodel`` unless that is None, takes of ``batch`` rows within
        ``limits``; where none does, that any engine takes. Raises InputError beyond every bucket."""
        buckets = self.buckets_for(batch, 1)
        engines = [one for name, own in self._engines.items() if submodel in (None, name) for one in own]
        taking = [engine for engine in engines if engine.entry.bucket in buckets]
        longest = max((engine.longest_sequence(int(batch), limits) for engine in taking), default=0)
        return longest or max(bucket.sequence for bucket in buckets)

    def buckets_for(self, batch: int, sequence: int) -> list[Bucket]:
        """Those of engines here that take such an input, in several runs if need be. Raises InputError for none."""
        check_sizes(batch, sequence)
        shape = Bucket(1 if self._has_rows else int(batch), int(sequence))
        buckets = sorted({engine.entry.bucket for engines in self._engines.values() for engine in engines})
        holding = [bucket for bucket in buckets if bucket.holds(shape)]
        if not holding and any(engine.bucket.holds(shape) for engine in self._whole):
            raise SelectionError(
                f"no engine takes {batch}x{sequence} here: memory_mb leaves out any that would, or they need another "
                f"backend; there is {', '.join(bucket.label for bucket in buckets)}"
            )
        if not holding:
            known = ", ".join(bucket.label for bucket in buckets)
            raise InputError(
                f"input of {batch} rows x {sequence} is larger than every bucket of this bundle ({known}); "
                "shorten it, or compile with a larger bucket"
                if self._has_rows
                else f"input of {batch} rows x {sequence} is larger than every bucket of this bundle ({known}), and "
                "has no rows that could be answered one by one; send less at once, or compile with a larger bucket"
            )
        return holding


def check_sizes(batch: object, sequence: object) -> None:
    for name, size in (("batch", batch), ("sequence", sequence)):
        if not isinstance(size, int | np.integer) or isinstance(size, bool):
            raise InputError(f"{name}: expected a whole number, got {size!r:.80}")
        number = int(size)
        if not 0 < number <= _MAX_DIMENSION:
            raise InputError(
                f"{name}: expected 1 to {_MAX_DIMENSION}, got {number if abs(number) <= _MAX_DIMENSION else 'more'}"
            )
