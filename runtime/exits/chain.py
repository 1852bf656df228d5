"""The segments of one submodel, run one after the other: rows leave where an exit is certain of them.

After each segment a gate decides row by row. The rows that stay are moved together, and cut to the longest of them,
where the engines for fewer rows or steps are cheaper; else the others stay in place and are ignored, since rows never
interact. So a row's answer is the one that it would get alone, up to the rounding of engines of different shapes.
Shapes: ``B`` rows of a request, ``n`` rows in the chain, ``s`` steps, ``H`` hidden, ``C`` classes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock
from time import perf_counter

import numpy as np

from ...bucket import Bucket
from ...bundle.build_record import Latency
from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.open_bundle import Bundle
from ...errors import InputError, SelectionError
from ..engines.runner import EnginePool
from ..inputs.arrays import Array, InputChecker
from .device_workspace import DeviceWorkspace
from .policy import ExitPolicy, check_count
from .segments import BatchPlan, BatchPlanner, remembered, segments_of
from .workspace import HostWorkspace, Workspace

# Workspaces that wait for the next request. More requests at once make their own on the processor. On a device, where
# runs follow each other anyway, they wait: what sessions captured for a workspace they keep, so the chain keeps it too.
_MAX_IDLE_WORKSPACES = 4
# Rows move where the next segment then costs at most so much of what it would; moving takes 0.1 to 0.3 ms itself.
_WORTH_MOVING = 0.97


@dataclass(frozen=True, eq=False)
class SegmentRun:
    """State after each segment, for a watcher: the rows that were still in the chain.

    ``rows`` [n] are their numbers in the request, in the order of the other arrays: ``logits`` [n, C], ``entropy`` [n]
    and ``state`` [n, s, H] (None if the engine returns none), which are valid during the call only. ``buckets`` are
    the shapes that ran, and ``milliseconds`` the time since the segment before ended, its gate and moving included.
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
class Rest:
    """Rows that stopped between two segments: ``rows`` [n] are their numbers in the request, ``feeds`` what segment
    number ``segment`` takes of them, by name, as long as the longest. With others that stopped there they may go on."""

    segment: int
    rows: Array
    feeds: Mapping[str, Array]


# Whether so many rows of up to so many steps stop before a segment, by its number, in place of going on.
Stop = Callable[[int, int, int], bool]


@dataclass(frozen=True, eq=False)
class ChainRun:
    """Answers by row, owned by the caller: ``logits`` [B, C] and ``entropy`` [B] (float32) of the exit that answered.

    ``index`` [B] says which (from 0), ``layer`` [B] how many layers ran, ``flops`` [B] what the row cost: its share of
    every engine that it went through (int64 each; ``EngineEntry.row_flops``). The first segment ran at the shapes
    ``buckets``; opening engines took ``open_ms``. Rows of the ``rest``, if any stopped, have no answer yet.
    """

    logits: Array
    entropy: Array
    index: Array
    layer: Array
    flops: Array
    buckets: tuple[Bucket, ...]
    open_ms: float
    rest: Rest | None = None


class ExitChain:
    """The exits of ``submodel`` (its id) on the engines of ``pool``. Thread-safe.

    ``engines`` are the ids of engines that may be used, all that can run here by default. ``latencies`` decide which
    buckets run how many rows: measured medians, else predictions, else tokens, and on a device runs. ``entry`` is what
    the manifest says of the model's exits. Raises SelectionError where there are none or not all segments may be used.
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
        self.entry = manifest.exits
        self._segments = segments_of(bundle, manifest.exits, submodel, pool, latencies, engines)
        self.exits = len(self._segments)
        self.layers = tuple(segment.entry.layer for segment in self._segments)
        self._layers = np.array(self.layers, np.int64)
        self._inputs = InputChecker(manifest.inputs)
        self._buckets = self._segments[0].buckets
        self._check_fits, self._flops_of = remembered(self._require_fit), remembered(self._row_flops)
        self.share = remembered(self._share)
        self._idle: list[Workspace] = []
        self._idle_lock = Lock()
        self._kept = _MAX_IDLE_WORKSPACES
        on_device = self._segments[0].device_source is not None
        # States of rows that stop are held on the host, and those of several requests are brought to one length.
        self.may_stop = self.entry.trims and not on_device
        self._turns: AbstractContextManager[object] = (
            BoundedSemaphore(_MAX_IDLE_WORKSPACES) if on_device else nullcontext()
        )

    def run(
        self, feeds: Mapping[str, Array], policy: ExitPolicy, watch: Callable[[SegmentRun], None] | None = None
    ) -> ChainRun:
        """Answers a request. ``watch`` is called after each segment.

        Raises InputError for inputs that do not fit the model or any bucket, SelectionError for a wrong number of
        thresholds, BundleError if an engine cannot be opened.
        """
        return self.answer(feeds, self._inputs.shape_of(feeds), policy, watch)

    def batch_plan(self, segment: int, rows: int, longest: int) -> tuple[Bucket, ...]:
        """The shapes at which ``rows`` rows of up to ``longest`` steps run through segment number ``segment``."""
        return self._plan(self._segments[segment].planner, rows, longest).buckets

    def engine(self, segment: int, shape: Bucket) -> EngineEntry:
        """The engine that runs segment number ``segment`` at ``shape``, one of a batch plan."""
        return self._segments[segment].engine(shape)

    def release(self) -> None:
        """Gives back waiting workspaces, which are bound to engines; their pool has been closed."""
        with self._idle_lock:
            self._kept, idle, self._idle = 0, self._idle, []
        for workspace in idle:
            workspace.close()

    def answer(
        self,
        feeds: Mapping[str, Array],
        shape: Bucket,
        policy: ExitPolicy,
        watch: Callable[[SegmentRun], None] | None = None,
        first: int = 0,
        stop: Stop | None = None,
    ) -> ChainRun:
        """As ``run``, on inputs of this ``shape`` that have been checked, or on the ``feeds`` of rows that stopped
        before segment number ``first``; ``stop`` is asked after each segment."""
        check_count(policy.thresholds, self.exits)
        self._check_fits(shape)
        with self._turns:
            opened_ms = 0.0
            with self._idle_lock:
                workspace = self._idle.pop() if self._idle else None
            if workspace is None:
                started = perf_counter()
                # Only an open engine is known to have the shapes for which memory is taken.
                self._segments[first].runner(self.batch_plan(first, shape.batch, shape.sequence)[0])
                opened_ms = 1e3 * (perf_counter() - started)
                workspace = self._new_workspace()
            try:
                return self._walk(workspace, feeds, shape, policy, watch, opened_ms, first, stop)
            finally:
                with self._idle_lock:
                    is_kept = len(self._idle) < self._kept
                    if is_kept:
                        self._idle.append(workspace)
                if not is_kept:
                    workspace.close()

    def _new_workspace(self) -> Workspace:
        # A batch plan has fewer spare rows than the largest batch.
        rows = 2 * max(bucket.batch for bucket in self._buckets)
        sequence = max(bucket.sequence for bucket in self._buckets)
        source = self._segments[0].device_source
        return (
            HostWorkspace(self.entry, rows, sequence)
            if source is None
            else DeviceWorkspace(self.entry, rows, sequence, source())
        )

    def _walk(
        self,
        workspace: Workspace,
        feeds: Mapping[str, Array],
        shape: Bucket,
        policy: ExitPolicy,
        watch: Callable[[SegmentRun], None] | None,
        opened_ms: float,
        begin: int,
        stop: Stop | None,
    ) -> ChainRun:
        batch, rest = shape.batch, None
        mask = feeds[self.entry.mask]
        lengths = _lengths(mask) if self.entry.trims else [shape.sequence] * batch
        longest = max(lengths)
        # Books are kept in lists: between two engines the caches hold weights, and every numpy function comes anew.
        index, places, flops = [0] * batch, [0] * batch, [0] * batch

        rows = list(range(batch))  # number in the request of the row at each position
        live = rows  # positions of the rows that have not left
        moved = begin  # the segment that first ran on the rows as they lie now
        plan = first = self._plan(self._segments[begin].planner, batch, longest)
        source = 0
        workspace.open_ms = opened_ms
        started = perf_counter()
        workspace.fill(feeds, plan, is_begun=begin > 0)
        for number, segment in enumerate(self._segments[begin:], begin):
            is_last = number == self.exits - 1
            step = workspace.step(number, segment.entry, plan, source, not is_last or bool(watch), segment.runner)
            for call in step.calls:
                call()
            source = 1 - source
            if watch is not None:
                state = None if step.state is None else step.state()[live]
                took = 1e3 * (perf_counter() - started)
                here = np.array([rows[place] for place in live])
                answers = step.logits[live], step.entropy[live]
                watch(SegmentRun(number, segment.entry.layer, here, *answers, state, plan.buckets, took))
                started = perf_counter()

            certain = step.entropy.tolist()
            leaves = [is_last] * len(live)
            if not is_last:
                leaves = policy.leavers(number, [certain[place] for place in live])
                if stop is None and not any(leaves):
                    continue
            gone = [place for place, is_out in zip(live, leaves, strict=True) if is_out]
            cost = self._flops_of(moved, number, plan)
            for place in gone:
                row = rows[place]
                index[row], places[row] = number, place
                flops[row] += cost[place]
            if len(gone) == len(live):
                break

            stays = [place for place, is_out in zip(live, leaves, strict=True) if not is_out]
            longest = max([lengths[rows[place]] for place in stays])
            if stop is not None and stop(number + 1, len(stays), longest):
                assert step.state is not None  # this is not the last segment
                for place in stays:
                    flops[rows[place]] += cost[place]
                here = np.array([rows[place] for place in stays])
                state = step.state()[stays, :longest]
                rest = Rest(number + 1, here, {self.entry.state_in: state, self.entry.mask: mask[here, :longest]})
                break
            planner = self._segments[number + 1].planner
            fewer = self._plan(planner, len(stays), longest)
            live = stays
            if fewer.cost < _WORTH_MOVING * planner.cost(plan):
                for place in stays:
                    flops[rows[place]] += cost[place]
                origin, source = workspace.compact(np.array(stays), plan, fewer, source)
                rows = [rows[place] for place in origin.tolist()]
                live, plan, moved = list(range(len(rows))), fewer, number + 1
        answered = np.array(index, np.int64)
        logits, entropy = workspace.answers(answered, np.array(places, np.int64))
        return ChainRun(
            logits,
            entropy,
            answered,
            self._layers[answered],
            np.array(flops, np.int64),
            first.buckets,
            workspace.open_ms,
            rest,
        )

    def _require_fit(self, shape: Bucket) -> None:
        """The rule of whole engines: one bucket holds the request."""
        if not any(bucket.holds(shape) for bucket in self._buckets):
            raise InputError(
                f"input of {shape.batch} rows x {shape.sequence} is larger than every bucket of these exits "
                f"({', '.join(bucket.label for bucket in self._buckets)}); send less at once"
            )

    def _row_flops(self, first: int, last: int, plan: BatchPlan) -> list[int]:
        """Cost of each row of ``plan`` from segment number ``first`` to ``last``."""
        segments = self._segments[first : last + 1]
        return [
            sum(one.engine(shape).row_flops(shape.sequence) for one in segments)
            for shape in plan.buckets
            for _ in range(shape.batch)
        ]

    def _share(self, first: int, rows: int, longest: int) -> float:
        """The part of the cost of all segments that those from number ``first`` on have, for so many rows."""
        costs = [self._plan(one.planner, rows, longest).cost for one in self._segments]
        return sum(costs[first:]) / sum(costs)

    def _plan(self, planner: BatchPlanner, rows: int, longest: int) -> BatchPlan:
        """Where steps behind the longest row change answers, the request's own length decides how many there are."""
        return planner.cheapest(rows, longest) if self.entry.trims else planner.shortest(rows, longest)


def _lengths(mask: Array) -> list[int]:
    """The last position that counts, plus 1, of every row of a mask ``[B, S]`` of whole numbers.

    Attention in a row where none counts is spread over all of them, so that such a row is never cut.
    """
    raw, width = mask.tobytes(), mask.shape[1] * mask.itemsize
    # Bytes without the zeros at their end: next to no code, where numpy's reductions would have to be woken.
    ends = [len(raw[begin : begin + width].rstrip(b"\0")) for begin in range(0, len(raw), width)]
    return [-(-end // mask.itemsize) or mask.shape[1] for end in ends]
