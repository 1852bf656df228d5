"""Which rows move where when some leave a batch: a pure decision, in as few copies as rows lie side by side."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.engine_entry import ExitsEntry, SegmentEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ...errors import InputError
from ..device.device import DeviceCall
from ..engines.runner import Runner
from ..inputs.arrays import Array
from .segments import BatchPlan


class Move(NamedTuple):
    """``rows`` rows from ``source`` on go to ``target`` on."""

    target: int
    source: int
    rows: int


def to_front(positions: Sequence[int]) -> tuple[list[int], list[Move]]:
    """The rows at ``positions`` (rising) in place at the front: rows that lie there stay, others fill the gaps.

    Returns the position that each row came from, and the moves, whose sources and targets do not overlap.
    """
    count = len(positions)
    origin = list(range(count))
    kept = [position for position in positions if position < count]
    free = sorted(set(range(count)).difference(kept))
    movers = list(positions[len(kept) :])
    for place, mover in zip(free, movers, strict=True):
        origin[place] = mover
    return origin, side_by_side(free, movers)


def side_by_side(targets: Sequence[int], sources: Sequence[int]) -> list[Move]:
    """One move for each run of rows that are consecutive on both sides."""
    moves: list[Move] = []
    for target, source in zip(targets, sources, strict=True):
        if moves:
            last = moves[-1]
            if (target, source) == (last.target + last.rows, last.source + last.rows):
                moves[-1] = Move(last.target, last.source, last.rows + 1)
                continue
        moves.append(Move(target, source, 1))
    return moves


# In a range every size has steps of its own: about 0.1 ms for each segment when the size is first met, and 6 kB kept.
_MAX_BOUND_STEPS = 512


class StepKey(NamedTuple):
    """Which step: segment number ``segment`` over ``plan``, reading state ``source``; whether it returns its own."""

    segment: int
    plan: BatchPlan
    source: int
    fetch_state: bool


@dataclass(frozen=True)
class Step:
    """One segment over one batch plan, ready to run: the calls in order, and what they write. ``logits`` [R, C],
    ``entropy`` [R]; ``state`` gives the state [R, s, H], None where it is not fetched. ``bound`` are those of the calls
    that keep something on a device."""

    calls: tuple[Callable[[], None], ...]
    logits: Array
    entropy: Array
    state: Callable[[], Array] | None
    bound: tuple[DeviceCall, ...] = ()

    def close(self) -> None:
        """Gives back what the calls keep; none may be made afterwards."""
        for call in self.bound:
            call.close()


class Steps:
    """Steps by what they depend on, a bounded number of them: the ones that were requested last."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Step] = {}

    def get(self, key: Hashable, bind: Callable[[], Step]) -> Step:
        """The step for ``key``, made by ``bind`` when it is first requested; another may be closed for it."""
        step = self._known.pop(key, None)
        if step is None:
            if len(self._known) >= _MAX_BOUND_STEPS:
                self._known.pop(next(iter(self._known))).close()
            step = bind()
        self._known[key] = step  # the last now
        return step

    def close(self) -> None:
        """Closes and forgets all of them."""
        while self._known:
            self._known.popitem()[1].close()


# Inputs of a request by name.
Feeds = Mapping[str, Array]


class Workspace(ABC):
    """Buffers for one request at a time. ``open_ms`` is what opening and binding engines took, which a chain resets."""

    # Answers of every exit, on the host, so that they stay where they are until the request ends: logits
    # [exits, R, C] and entropy [exits, R].
    _answers: tuple[Array, ...]
    # Where the inputs lie, by name, and the two states, of which a segment reads one and writes the other. Engines read
    # one mask, so that one of other steps is put together beside it and copied over it.
    _buffers: Mapping[str, Any]
    _states: tuple[Any, Any]
    _other_mask: Any

    def __init__(self, exits: ExitsEntry) -> None:
        self._exits = exits
        first = exits.segments[0]
        self._inputs = first.inputs
        specs = {spec.name: spec for spec in first.outputs}
        self._state_spec = specs[exits.state_out]
        (self._mask_spec,) = (spec for spec in first.inputs if spec.name == exits.mask)
        self._answer_specs = (specs[exits.logits], specs[exits.entropy])
        # Inputs of segments behind the first, once for all of them.
        self._begun = (replace(self._state_spec, name=exits.state_in, pad=0), self._mask_spec)
        self._steps = Steps()
        self.open_ms = 0.0

    @abstractmethod
    def fill(self, feeds: Feeds, plan: BatchPlan, is_begun: bool = False) -> None:
        """Puts a request where the first segment reads it, or what has begun where a later one does from state 0, cut
        or padded to the batch plan; spare rows are all 0.

        Raises InputError for an input that cannot be padded.
        """

    def compact(self, positions: Array, old: BatchPlan, new: BatchPlan, source: int) -> tuple[Array, int]:
        """Moves the rows at ``positions`` (int64, rising) of state ``source``, laid out as ``old``, to the front of
        ``new``. Returns the position that each row came from, and the state that they are in now."""
        places = positions.tolist()
        count = len(places)
        before, after = Bucket(old.rows, old.sequence), Bucket(new.rows, new.sequence)
        state, mask = self._states[source], self._buffers[self._exits.mask]
        if new.sequence == old.sequence:
            origin, moves = to_front(places)
            for spec, memory in ((self._state_spec, state), (self._mask_spec, mask)):
                self._copy(spec, moves, memory, before, memory, before)
                self._clear_rows(spec, memory, after, old.rows)
            return np.array(origin), source

        moves = side_by_side(range(count), places)
        other, other_mask = self._states[1 - source], self._other_mask
        for spec, memory, target in ((self._state_spec, state, other), (self._mask_spec, mask, other_mask)):
            self._copy(spec, moves, memory, before, target, after)
            self._clear_steps(spec, target, after, count, old.sequence)
            self._clear_rows(spec, target, after, count)
        self._copy(self._mask_spec, [Move(0, 0, new.rows)], other_mask, after, mask, after)
        return positions, 1 - source

    @abstractmethod
    def _copy(self, spec: TensorSpec, moves: list[Move], source: Any, old: Bucket, target: Any, new: Bucket) -> None:
        """Copies rows as long as the shorter of both."""

    @abstractmethod
    def _clear_rows(self, spec: TensorSpec, memory: Any, size: Bucket, begin: int) -> None:
        """Makes rows from ``begin`` on 0, if there are any."""

    @abstractmethod
    def _clear_steps(self, spec: TensorSpec, memory: Any, size: Bucket, rows: int, begin: int) -> None:
        """Makes the steps from ``begin`` on of the first ``rows`` 0, if there are any."""

    @abstractmethod
    def close(self) -> None:
        """Gives back all of it; no step may run afterwards."""

    @abstractmethod
    def _bind(self, key: StepKey, segment: SegmentEntry, runner: Callable[[Bucket], Runner]) -> Step:
        """Binds the engines of a step, see ``step``."""

    def step(
        self,
        index: int,
        segment: SegmentEntry,
        plan: BatchPlan,
        source: int,
        fetch_state: bool,
        runner: Callable[[Bucket], Runner],
    ) -> Step:
        """Segment number ``index`` over a batch plan: from the inputs (number 0) or state ``source`` into the other.

        Engines are bound when a step is first requested; the time that this took is added to ``open_ms``.
        """
        key = StepKey(index, plan, source, fetch_state)
        return self._steps.get(key, lambda: self._bind(key, segment, runner))

    def answers(self, exits: Array, places: Array) -> tuple[Array, Array]:
        """Copies of the answers that stand at ``places`` [B] of ``exits`` [B] (int64): logits [B, C], entropy [B]."""
        logits, entropy = self._answers
        return logits[exits, places], entropy[exits, places]

    def _engines(self, plan: BatchPlan, runner: Callable[[Bucket], Runner]) -> Iterator[tuple[Runner, int, int]]:
        """The open engines of a batch plan, each with its first row and the row behind its last; what the caller does
        with each counts as opening it."""
        begin = 0
        for bucket in plan.buckets:
            end = begin + bucket.batch
            started = perf_counter()
            yield runner(bucket), begin, end
            self.open_ms += 1e3 * (perf_counter() - started)
            begin = end


def put_rows(spec: TensorSpec, target: Array, given: Array) -> None:
    """Copies one input of a request into ``target``, cut or padded to its rows and steps; spare rows are all 0.

    Raises InputError for an input that cannot be padded.
    """
    if given.shape == target.shape:
        target[...] = given
        return
    rows = len(given)
    if "sequence" in spec.dims:
        steps = min(given.shape[1], target.shape[1])
        if steps < target.shape[1]:
            if spec.pad is None:
                raise InputError(
                    f"input {spec.name}: cannot be padded, and shape {list(given.shape)} has not the bucket's "
                    f"{target.shape[1]} steps; send exactly that"
                )
            target[:rows, steps:] = spec.pad
        target[:rows, :steps] = given[:, :steps]
    else:
        target[:rows] = given
    target[rows:] = 0


_CACHE_LINE_BYTES = 64
_MAX_REMEMBERED_SIZES = 1024


class HostWorkspace(Workspace):
    """Buffers for up to ``rows`` rows of ``sequence`` steps."""

    def __init__(self, exits: ExitsEntry, rows: int, sequence: int) -> None:
        super().__init__(exits)
        most = Bucket(rows, sequence)
        self._buffers = {spec.name: _flat(spec, most) for spec in self._inputs}
        self._states = (_flat(self._state_spec, most), _flat(self._state_spec, most))
        self._other_mask = _flat(self._mask_spec, most)
        count = len(exits.segments)
        self._answers = tuple(_flat(spec, most, count).reshape(count, *spec.shape(most)) for spec in self._answer_specs)
        self._filled: dict[tuple[int, int, bool], tuple[Array, ...]] = {}

    def fill(self, feeds: Feeds, plan: BatchPlan, is_begun: bool = False) -> None:
        specs = self._begun if is_begun else self._inputs
        size = (plan.rows, plan.sequence, is_begun)
        targets = self._filled.get(size)
        if targets is None:
            if len(self._filled) >= _MAX_REMEMBERED_SIZES:
                self._filled.clear()
            shape = Bucket(plan.rows, plan.sequence)
            targets = tuple(_view(self._buffers.get(s.name, self._states[0]), s, shape) for s in specs)
            self._filled[size] = targets
        for spec, target in zip(specs, targets, strict=True):
            put_rows(spec, target, feeds[spec.name])

    def _copy(self, spec: TensorSpec, moves: list[Move], source: Any, old: Bucket, target: Any, new: Bucket) -> None:
        before, after = _view(source, spec, old), _view(target, spec, new)
        steps = min(old.sequence, new.sequence)
        for to, begin, count in moves:
            after[to : to + count, :steps] = before[begin : begin + count, :steps]

    def _clear_rows(self, spec: TensorSpec, memory: Any, size: Bucket, begin: int) -> None:
        _view(memory, spec, size)[begin:] = 0

    def _clear_steps(self, spec: TensorSpec, memory: Any, size: Bucket, rows: int, begin: int) -> None:
        _view(memory, spec, size)[:rows, begin:] = 0

    def _bind(self, key: StepKey, segment: SegmentEntry, runner: Callable[[Bucket], Runner]) -> Step:
        index, plan, source, fetch_state = key
        exits, size = self._exits, Bucket(plan.rows, plan.sequence)
        feeds = {
            spec.name: _view(
                self._states[source] if spec.name == exits.state_in else self._buffers[spec.name], spec, size
            )
            for spec in segment.inputs
        }
        logits, entropy = (buffer[index, : plan.rows] for buffer in self._answers)
        outputs = {exits.logits: logits, exits.entropy: entropy}
        fetched = {spec.name: spec for spec in segment.outputs if fetch_state and spec.name == exits.state_out}
        for name, spec in fetched.items():
            outputs[name] = _view(self._states[1 - source], spec, size)
        calls = []
        for engine, begin, end in self._engines(plan, runner):
            rows = slice(begin, end)
            calls.append(
                engine.bind({n: array[rows] for n, array in feeds.items()}, {n: a[rows] for n, a in outputs.items()})
            )
        state = outputs.get(exits.state_out)
        return Step(tuple(calls), logits, entropy, None if state is None else lambda: state)

    def close(self) -> None:
        """Nothing is held but memory, which the garbage collector gives back."""


def _flat(spec: TensorSpec, most: Bucket, copies: int = 1) -> Array:
    """Elements for ``most``, from the beginning of a cache line on, as the backend's own buffers are."""
    dtype = np.dtype(spec.dtype)
    size = copies * prod(spec.shape(most)) * dtype.itemsize
    room = np.empty(size + _CACHE_LINE_BYTES, np.uint8)
    begin = -room.ctypes.data % _CACHE_LINE_BYTES
    return room[begin : begin + size].view(dtype)


def _view(buffer: Array, spec: TensorSpec, size: Bucket) -> Array:
    shape = spec.shape(size)
    return buffer[: prod(shape)].reshape(shape)
