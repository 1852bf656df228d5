"""The workspace of a chain on a GPU: the state between two segments stays there, and so do the rows that move.

The same buffers as in workspace.py, in the device's memory: a request's inputs go over once, every segment reads the
state that the one before wrote, rows that stay are moved together by copies within the device, and only logits and
entropies come back, since the host decides by them who leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from typing import Any, cast

import numpy as np

from ...bucket import Bucket
from ...bundle.entries.engine_entry import ExitsEntry, SegmentEntry
from ...bundle.entries.tensor_spec import TensorSpec
from ..device.device import Device, DeviceArray, DeviceCall
from ..engines.runner import DeviceRunner, Runner
from ..inputs.arrays import Array
from .segments import BatchPlan
from .workspace import Feeds, Move, Step, StepKey, Workspace, put_rows


class DeviceWorkspace(Workspace):
    """Buffers on ``device``, whose use it ends when it is closed, for up to ``rows`` rows of ``sequence`` steps.

    One request at a time.
    """

    def __init__(self, exits: ExitsEntry, rows: int, sequence: int, device: Device) -> None:
        """Raises BundleIncompatibleError where the device has too little memory."""
        super().__init__(exits)
        self._device = device
        most = Bucket(rows, sequence)
        self._blocks: list[int] = []
        self._staged: list[Array] = []
        self._pending = False
        count = len(exits.segments)
        try:
            self._buffers = {spec.name: self._allocate(spec, most) for spec in self._inputs}
            self._states = (self._allocate(self._state_spec, most), self._allocate(self._state_spec, most))
            self._other_mask = self._allocate(self._mask_spec, most)
            self._fresh = tuple(self._allocate(spec, most) for spec in self._answer_specs)
            self._staging = {spec.name: self._stage(spec, most) for spec in self._inputs}
            self._answers = tuple(
                self._stage(spec, most, count).reshape(count, *spec.shape(most)) for spec in self._answer_specs
            )
        except BaseException:
            self.close()
            raise

    def fill(self, feeds: Feeds, plan: BatchPlan, is_begun: bool = False) -> None:
        assert not is_begun  # ExitChain.may_stop
        if self._pending:  # the request before failed on its way, and its copies may still read what is written now
            self._device.wait()
        self._pending = True
        size = Bucket(plan.rows, plan.sequence)
        for spec in self._inputs:
            shape = spec.shape(size)
            target = self._staging[spec.name][: prod(shape)].reshape(shape)
            put_rows(spec, target, feeds[spec.name])
            self._device.to_device(self._buffers[spec.name], target)

    def close(self) -> None:
        """Frees all of it, and what engines keep for it; no step may run afterwards."""
        device = self._device
        with device.lock:
            device.wait()
            self._steps.close()
            for address in self._blocks:
                device.free(address)
            for staged in self._staged:
                device.free_staging(staged)
            self._blocks, self._staged = [], []
        device.release()

    def _allocate(self, spec: TensorSpec, most: Bucket) -> int:
        address = self._device.allocate(prod(spec.shape(most)) * np.dtype(spec.dtype).itemsize)
        self._blocks.append(address)
        return address

    def _stage(self, spec: TensorSpec, most: Bucket, copies: int = 1) -> Array:
        staged = self._device.staging(copies * prod(spec.shape(most)) * np.dtype(spec.dtype).itemsize)
        self._staged.append(staged)
        return staged.view(spec.dtype)

    def _bind(self, key: StepKey, segment: SegmentEntry, runner: Callable[[Bucket], Runner]) -> Step:
        index, plan, source, fetch_state = key
        exits, size, device = self._exits, Bucket(plan.rows, plan.sequence), self._device
        feeds = {
            spec.name: DeviceArray(
                self._states[source] if spec.name == exits.state_in else self._buffers[spec.name],
                spec.dtype,
                spec.shape(size),
            )
            for spec in segment.inputs
        }
        outputs = {
            spec.name: DeviceArray(address, spec.dtype, spec.shape(size))
            for spec, address in zip(self._answer_specs, self._fresh, strict=True)
        }
        answers = [(outputs[spec.name], kept[index, : plan.rows]) for spec, kept in self._fetched()]
        state = next((spec for spec in segment.outputs if fetch_state and spec.name == exits.state_out), None)
        if state is not None:
            outputs[state.name] = DeviceArray(self._states[1 - source], state.dtype, state.shape(size))
        with ExitStack() as stack:
            calls: list[DeviceCall] = []
            for engine, begin, end in self._engines(plan, runner):
                call = cast(DeviceRunner, engine).bind_device(  # what the pool gives for engines on a device
                    {name: array.rows(begin, end) for name, array in feeds.items()},
                    {name: array.rows(begin, end) for name, array in outputs.items()},
                )
                stack.callback(call.close)  # where the next engine cannot be opened
                calls.append(call)
            stack.pop_all()

        def fetch() -> None:
            for array, kept in answers:
                device.to_host(kept, array.address)
            device.wait()
            self._pending = False

        logits, entropy = (kept for _, kept in answers)
        read = None if state is None else self._reader(outputs[state.name])
        return Step((*calls, fetch), logits, entropy, read, tuple(calls))

    def _fetched(self) -> zip[tuple[TensorSpec, Array]]:
        return zip(self._answer_specs, self._answers, strict=True)

    def _reader(self, array: DeviceArray) -> Callable[[], Array]:
        def read() -> Array:
            host = np.empty(array.shape, array.dtype)
            self._device.to_host(host, array.address)
            self._device.wait()
            return host

        return read

    def _copy(self, spec: TensorSpec, moves: list[Move], source: Any, old: Bucket, target: Any, new: Bucket) -> None:
        source_pitch, pitch = _row_bytes(spec, old), _row_bytes(spec, new)
        width = min(source_pitch, pitch)
        for to, begin, count in moves:
            self._device.copy_rows(
                target + to * pitch, pitch, source + begin * source_pitch, source_pitch, width, count
            )

    def _clear_rows(self, spec: TensorSpec, memory: Any, size: Bucket, begin: int) -> None:
        pitch = _row_bytes(spec, size)
        if begin < size.batch:
            self._device.clear_rows(memory + begin * pitch, pitch, pitch, size.batch - begin)

    def _clear_steps(self, spec: TensorSpec, memory: Any, size: Bucket, rows: int, begin: int) -> None:
        if begin < size.sequence:
            pitch, kept = _row_bytes(spec, size), _row_bytes(spec, Bucket(1, begin))
            self._device.clear_rows(memory + kept, pitch, pitch - kept, rows)


def _row_bytes(spec: TensorSpec, size: Bucket) -> int:
    return prod(spec.shape(size)[1:]) * np.dtype(spec.dtype).itemsize
