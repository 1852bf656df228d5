"""The workspace of a chain on the processor; the system gives pages only to what has been used."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.exits_entry import ExitsEntry, SegmentEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ..engines.runner import Runner
from ..inputs.arrays import Array
from .batch_plan import BatchPlan
from .steps import Step, StepKey
from .workspace import Feeds, Workspace, put_rows

_CACHE_LINE_BYTES = 64
_MAX_REMEMBERED_SIZES = 1024


class HostWorkspace(Workspace):
    """Buffers for up to ``rows`` rows of ``sequence`` steps."""

    def __init__(self, exits: ExitsEntry, rows: int, sequence: int) -> None:
        super().__init__(exits)
        most = Bucket(rows, sequence)
        self._buffers = {spec.name: _flat(spec, most) for spec in self._inputs}
        self._states = (_flat(self._state_spec, most), _flat(self._state_spec, most))
        count = len(exits.segments)
        self._answers = tuple(_flat(spec, most, count).reshape(count, *spec.shape(most)) for spec in self._answer_specs)
        self._filled: dict[tuple[int, int], tuple[Array, ...]] = {}

    def fill(self, feeds: Feeds, plan: BatchPlan) -> None:
        size = (plan.rows, plan.sequence)
        targets = self._filled.get(size)
        if targets is None:
            if len(self._filled) >= _MAX_REMEMBERED_SIZES:
                self._filled.clear()
            targets = tuple(_view(self._buffers[spec.name], spec, Bucket(*size)) for spec in self._inputs)
            self._filled[size] = targets
        for spec, target in zip(self._inputs, targets, strict=True):
            put_rows(spec, target, feeds[spec.name])

    def keep(self, positions: Array, old: BatchPlan, new: BatchPlan, source: int) -> tuple[Array, int]:
        count = len(positions)
        before = _view(self._states[source], self._state_spec, Bucket(old.rows, old.sequence))
        mask_spec = self._mask_spec
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
