"""The segments of one submodel, run one after the other: rows leave where an exit is certain of them.

After each segment a gate decides row by row. The rows that stay are moved together, and cut to the longest of them,
where the engines for fewer rows or steps are cheaper; else the others stay in place and are ignored, since rows never
interact. So a row's answer is the one that it would get alone, up to the rounding of engines of different shapes.
Shapes: ``B`` rows of a request, ``n`` rows in the chain, ``s`` steps, ``H`` hidden, ``C`` classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from ...elastic import Bucket
from ...errors import InputError, SelectionError
from ..arrays import Array
from ..bundle import Bundle
from ..engine_pool import EnginePool
from ..inputs import InputChecker
from ..manifest import EngineEntry, Latency
from .cover import Cover, Covers
from .policy import ExitPolicy, check_count
from .segments import segments_of
from .workspace import Workspace

# Workspaces that wait for the next request; more requests at once make their own.
_KEPT = 4


@dataclass(frozen=True, eq=False)
class SegmentRun:
    """What a watcher sees after each segment: the rows that were still in the chain.

    ``rows`` [n] are their numbers in the request, in the order of the other arrays: ``logits`` [n, C], ``entropy`` [n]
    and ``state`` [n, s, H] (None if the engine returns none), which are valid during the call only. ``buckets`` are
    the engines that ran, and ``milliseconds`` the time since the segment before ended, its gate and moving included.
    """

    exit_index: int
    layer: int
    rows: Array
    logits: Array
    entropy: Array
    state: Array | None
    buckets: tuple[Bucket, ...]
    milliseconds: float


@dataclass(frozen=True, eq=False)
class ChainRun:
    """Answers by row, owned by the caller: ``logits`` [B, C] and ``entropy`` [B] (float32) of the exit that answered.

    ``index`` [B] says which (from 0), ``layer`` [B] how many layers ran, ``flops`` [B] what the row cost: its share of
    every engine that it went through (int64 each). ``buckets`` ran the first segment; opening engines took ``open_ms``.
    """

    logits: Array
    entropy: Array
    index: Array
    layer: Array
    flops: Array
    buckets: tuple[Bucket, ...]
    open_ms: float


class ExitChain:
    """The exits of ``submodel`` (its id) on the engines of ``pool``. Thread-safe.

    ``engines`` are the ids of those that may be used, all that can run here by default. ``latencies`` decide which
    buckets run how many rows: measured medians, else predictions, else tokens. Raises SelectionError where the model
    has no exits or not all segments may be used.
    """

    def __init__(
        self,
        bundle: Bundle,
        submodel: str,
        pool: EnginePool,
        latencies: Sequence[Latency],
        engines: Collection[str] | None = None,
    ) -> None:
        manifest = bundle.manifest
        if manifest.exits is None:
            raise SelectionError(f"bundle {bundle.path}: this model has no exits to leave at; its whole engines answer")
        self._exits = manifest.exits
        self._segments = segments_of(bundle, manifest.exits, submodel, pool, latencies, engines)
        self.exits = len(self._segments)
        self.layers = tuple(segment.entry.layer for segment in self._segments)
        self._layers = np.array(self.layers, np.int64)
        self._inputs = InputChecker(manifest.inputs)
        self._buckets = sorted(self._segments[0].engines)
        self._fitting: set[tuple[int, int]] = set()
        self._flops: dict[tuple[int, int, Cover], Array] = {}
        self._idle: list[Workspace] = []
        self._kept = _KEPT

    def run(
        self, feeds: Mapping[str, Array], policy: ExitPolicy, watch: Callable[[SegmentRun], None] | None = None
    ) -> ChainRun:
        """Answers a request. ``watch`` is called after each segment.

        Raises InputError for inputs that do not fit the model or any bucket, SelectionError for a wrong number of
        thresholds, BundleError if an engine cannot be opened.
        """
        return self.answer(feeds, self._inputs.shape_of(feeds), policy, watch)

    def cover(self, segment: int, rows: int, longest: int) -> tuple[Bucket, ...]:
        """Which buckets run ``rows`` rows of up to ``longest`` steps through segment number ``segment``."""
        return self._cover(self._segments[segment].covers, rows, longest).buckets

    def engine(self, segment: int, bucket: Bucket) -> EngineEntry:
        """The engine that runs segment number ``segment`` at ``bucket``."""
        return self._segments[segment].engines[bucket]

    def release(self) -> None:
        """Lets go of the engines, which waiting workspaces are bound to; their pool has been closed."""
        self._kept = 0
        self._idle.clear()

    def answer(
        self,
        feeds: Mapping[str, Array],
        shape: Bucket,
        policy: ExitPolicy,
        watch: Callable[[SegmentRun], None] | None = None,
    ) -> ChainRun:
        """As ``run``, on inputs of this ``shape`` that have been checked."""
        check_count(policy.thresholds, self.exits)
        self._check_fits(shape)
        try:
            workspace = self._idle.pop()
        except IndexError:
            # A cover has fewer spare rows than the largest batch.
            rows = 2 * max(bucket.batch for bucket in self._buckets)
            workspace = Workspace(self._exits, rows, max(bucket.sequence for bucket in self._buckets))
        try:
            return self._walk(workspace, feeds, shape, policy, watch)
        finally:
            if len(self._idle) < self._kept:
                self._idle.append(workspace)

    def _walk(
        self,
        workspace: Workspace,
        feeds: Mapping[str, Array],
        shape: Bucket,
        policy: ExitPolicy,
        watch: Callable[[SegmentRun], None] | None,
    ) -> ChainRun:
        batch = shape.batch
        mask = feeds[self._exits.mask]
        lengths: Array | None = None
        longest = self._longest(mask) if self._exits.trims else shape.sequence
        logits = np.empty((batch, self._exits.classes), np.float32)
        entropy = np.empty(batch, np.float32)
        index = np.empty(batch, np.int64)
        flops = np.zeros(batch, np.int64)

        rows = np.arange(batch)  # number in the request of the row at each position
        live: Array | None = None  # positions of the rows that have not left; None is all
        moved = 0  # the segment that first ran on the rows as they lie now
        cover = first = self._cover(self._segments[0].covers, batch, longest)
        source = 0
        workspace.open_ms = 0.0
        started = perf_counter()
        workspace.fill(feeds, cover)
        for number, segment in enumerate(self._segments):
            is_last = number == self.exits - 1
            step = workspace.step(number, segment.entry, cover, source, not is_last or bool(watch), segment.runner)
            for call in step.calls:
                call()
            source = 1 - source
            at = slice(len(rows)) if live is None else live
            certain_of = step.entropy[at]
            if watch is not None:
                state = None if step.state is None else step.state[at]
                took = 1e3 * (perf_counter() - started)
                entry = segment.entry
                watch(
                    SegmentRun(number, entry.layer, rows[at], step.logits[at], certain_of, state, cover.buckets, took)
                )
                started = perf_counter()

            if not is_last and not policy.anyone_leaves(number, certain_of.tolist()):
                continue
            leaves = np.ones(len(certain_of), bool) if is_last else policy.leaving(number, certain_of)
            cost = self._flops_of(moved, number, cover)[at]
            if len(certain_of) == batch and leaves.all():  # as with one row always, and with every exit closed
                index.fill(number)
                logits, entropy, flops = step.logits[:batch].copy(), certain_of.copy(), cost.copy()
                break
            here, answer = rows[at], step.logits[at]
            gone = here[leaves]
            logits[gone], entropy[gone], index[gone] = answer[leaves], certain_of[leaves], number
            flops[gone] += cost[leaves]
            if len(gone) == len(here):
                break

            stays = np.flatnonzero(~leaves)
            here, positions = here[stays], stays if live is None else live[stays]
            if self._exits.trims:
                lengths = _lengths(mask) if lengths is None else lengths
                longest = int(lengths[here].max())
            covers = self._segments[number + 1].covers
            fewer = self._cover(covers, len(here), longest)
            if fewer.cost < covers.cost(cover):
                flops[here] += cost[stays]
                origin, source = workspace.keep(positions, cover, fewer, source)
                rows, live, cover, moved = rows[origin], None, fewer, number + 1
            else:
                live = positions
        return ChainRun(logits, entropy, index, self._layers[index], flops, first.buckets, workspace.open_ms)

    def _check_fits(self, shape: Bucket) -> None:
        """The rule of whole engines: one bucket holds the request."""
        size = (shape.batch, shape.sequence)
        if size in self._fitting:
            return
        if not any(shape.batch <= bucket.batch and shape.sequence <= bucket.sequence for bucket in self._buckets):
            raise InputError(
                f"input of {shape.batch} rows x {shape.sequence} is larger than every bucket of these exits "
                f"({', '.join(bucket.label for bucket in self._buckets)}); send less at once"
            )
        self._fitting.add(size)

    def _longest(self, mask: Array) -> int:
        """Steps of the longest row, mostly those of the request."""
        return mask.shape[1] if any(mask[:, -1].tolist()) else int(_lengths(mask).max())

    def _flops_of(self, first: int, last: int, cover: Cover) -> Array:
        """What each row of ``cover`` costs from segment number ``first`` to ``last``: int64 ``[R]``."""
        key = (first, last, cover)
        found = self._flops.get(key)
        if found is None:
            batches = [bucket.batch for bucket in cover.buckets]
            segments = self._segments[first : last + 1]
            shares = [sum(one.engines[bucket].flops // bucket.batch for one in segments) for bucket in cover.buckets]
            found = self._flops[key] = np.repeat(np.array(shares, np.int64), batches)
        return found

    def _cover(self, covers: Covers, rows: int, longest: int) -> Cover:
        """Where steps behind the longest row change answers, the request's own length decides how many there are."""
        return covers.cheapest(rows, longest) if self._exits.trims else covers.shortest(rows, longest)


def _lengths(mask: Array) -> Array:
    """The last position that counts, plus 1: int64 ``[B]`` of a mask ``[B, S]``.

    Attention in a row where none counts is spread over all of them, so that such a row is never cut.
    """
    steps = mask.shape[1]
    ends = np.where(mask, np.arange(1, steps + 1), 0).max(axis=1)
    lengths: Array = np.where(ends, ends, steps)
    return lengths
