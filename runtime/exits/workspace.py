"""The buffers that a chain of segments works in, and engines bound to them.

The state goes back and forth between two buffers: a segment reads one and writes the other. All buffers are flat and as
large as the largest batch needs; a batch of ``R`` rows (spare ones included) and ``s`` steps is their beginning, so
that engines of any bucket read and write in place. The system gives pages only to what has been used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from time import perf_counter

import numpy as np

from ...elastic import Bucket
from ...errors import InputError
from ..bundle.manifest import ExitsEntry, SegmentEntry, TensorSpec
from ..engines.runner import Runner
from ..inputs.arrays import Array
from .batch_plan import BatchPlan
from .steps import Step, Steps

# Inputs of a request by name.
Feeds = Mapping[str, Array]

_CACHE_LINE_BYTES = 64


class Workspace:
    """Buffers for up to ``rows`` rows of ``sequence`` steps. One request at a time."""

    def __init__(self, exits: ExitsEntry, rows: int, sequence: int) -> None:
        self._exits = exits
        most = Bucket(rows, sequence)
        first = exits.segments[0]
        self._inputs = first.inputs
        specs = {spec.name: spec for spec in first.outputs}
        self._state_spec = specs[exits.state_out]
        self._answer_specs = (specs[exits.logits], specs[exits.entropy])
        self._buffers = {spec.name: _flat(spec, most) for spec in first.inputs}
        self._states = (_flat(self._state_spec, most), _flat(self._state_spec, most))
        # Every exit has its own, so that answers stay where they are until the request ends: [exits, rows, ...].
        count = len(exits.segments)
        self._answers = tuple(_flat(spec, most, count).reshape(count, *spec.shape(most)) for spec in self._answer_specs)
        self._filled: dict[tuple[int, int], tuple[Array, ...]] = {}
        self._steps = Steps()
        self.open_ms = 0.0

    def fill(self, feeds: Feeds, plan: BatchPlan) -> None:
        """Puts a request where the first segment reads it, cut or padded to the batch plan; spare rows are all 0.

        Raises InputError for an input that cannot be padded.
        """
        size = (plan.rows, plan.sequence)
        targets = self._filled.get(size)
        if targets is None:
            targets = tuple(_view(self._buffers[spec.name], spec, Bucket(*size)) for spec in self._inputs)
            self._filled[size] = targets
        for spec, target in zip(self._inputs, targets, strict=True):
            put_rows(spec, target, feeds[spec.name])

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

        Engines are bound when a step is first asked for; the time that opening them took is added to ``open_ms``.
        """
        return self._steps.get(
            (index, plan, source, fetch_state),
            lambda: self._bind(index, segment, plan, source, fetch_state, runner),
        )

    def keep(self, positions: Array, old: BatchPlan, new: BatchPlan, source: int) -> tuple[Array, int]:
        """Moves the rows at ``positions`` (int64, rising) of state ``source``, laid out as ``old``, to the front of
        ``new``. Returns the position that each row came from, and the state that they are in now."""
        count = len(positions)
        before = _view(self._states[source], self._state_spec, Bucket(old.rows, old.sequence))
        (mask_spec,) = (spec for spec in self._inputs if spec.name == self._exits.mask)
        mask_buffer = self._buffers[mask_spec.name]
        mask = _view(mask_buffer, mask_spec, Bucket(old.rows, old.sequence))
        after = Bucket(new.rows, new.sequence)

        if new.sequence == old.sequence:
            # Only rows behind the front move, into the places of rows that left: never more than half of them.
            origin = np.arange(count)
            first_moved = int(np.searchsorted(positions, count))
            movers = positions[first_moved:]
            if len(movers):
                is_free = np.ones(count, bool)
                is_free[positions[:first_moved]] = False
                free = np.flatnonzero(is_free)
                origin[free] = movers
                mask[free] = mask[movers]
                for place, mover in zip(free.tolist(), movers.tolist(), strict=True):
                    before[place] = before[mover]
            if new.rows > old.rows:
                _view(self._states[source], self._state_spec, after)[old.rows :] = 0
                _view(mask_buffer, mask_spec, after)[old.rows :] = 0
            return origin, source

        steps = min(old.sequence, new.sequence)
        state = _view(self._states[1 - source], self._state_spec, after)
        for place, position in enumerate(positions.tolist()):
            state[place, :steps] = before[position, :steps]
        kept = mask[positions, :steps]
        mask = _view(mask_buffer, mask_spec, after)
        mask[:count, :steps] = kept
        for target in (state, mask):
            target[:count, steps:] = 0
            target[count:] = 0
        return positions, 1 - source

    def answers(self, exits: Array, places: Array) -> tuple[Array, Array]:
        """Copies of the answers that stand at ``places`` [B] of ``exits`` [B] (int64): logits [B, C], entropy [B]."""
        logits, entropy = self._answers
        return logits[exits, places], entropy[exits, places]

    def _bind(
        self,
        index: int,
        segment: SegmentEntry,
        plan: BatchPlan,
        source: int,
        fetch_state: bool,
        runner: Callable[[Bucket], Runner],
    ) -> Step:
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
        begin = 0
        for bucket in plan.buckets:
            rows = slice(begin, begin + bucket.batch)
            started = perf_counter()
            opened = runner(bucket)
            self.open_ms += 1e3 * (perf_counter() - started)
            calls.append(
                opened.bind({n: array[rows] for n, array in feeds.items()}, {n: a[rows] for n, a in outputs.items()})
            )
            begin += bucket.batch
        state = outputs.get(exits.state_out)
        return Step(tuple(calls), logits, entropy, None if state is None else lambda: state)

    def close(self) -> None:
        """Nothing to give back: the garbage collector does."""


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
