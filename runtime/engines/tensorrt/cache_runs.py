"""Runs of an engine that generates, in one execution context: new tokens go over, logits come back, no more.

The context changes between the optimisation profiles of its plan, for steps and chunks, in the device's stream. Its
activations lie in memory of ours, so that CUDA graphs which were captured with it stay valid when it changes: they hold
the addresses that they were captured with. Those of a prompt, which grow by the square of its length, take what the
longest one so far needs, and runs of it are not captured.

Each run has page-locked memory of its own. The first two are queued call by call, since one that is not repeated, such
as a chunk of a prompt, is not worth a capture; after the second all of it, copies and kernels, is captured as one CUDA
graph, by which the following ones start. Where it cannot be captured they stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import tensorrt as trt

from ....bundle.shape_profile import Shape
from ....errors import BundleError
from ...device.cached_layout import CachedRun
from ...device.cuda_device import CudaDevice
from ...device.cuda_memory import Blocks, Graph, Stream, use_device
from ...inputs.arrays import Array
from .engine import captured, open_context, require_shapes, set_addresses, set_shapes

# Runs before the capture.
_CALL_BY_CALL = 2


@dataclass(frozen=True)
class Binding:
    """One run as TensorRT is told of it: the number of its optimisation ``profile``, and by name the shapes of inputs,
    the shapes that outputs must have, and where all of them lie."""

    profile: int
    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    addresses: Mapping[str, int]


class CacheContext:
    """Used by one run at a time, under the device's lock."""

    def __init__(
        self, where: str, engine: trt.ICudaEngine, device: CudaDevice, usual: Mapping[str, Shape] | None = None
    ) -> None:
        """Has memory for every run; where the shapes of inputs of a ``usual`` one are given, for those that are not
        larger, and more of it later. Raises BundleError where TensorRT opens none, BundleIncompatibleError where memory
        is short."""
        self.where, self.device, self.stays = where, device, usual is None
        context = open_context(where, engine, trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        self._context: trt.IExecutionContext | None = context
        self._memory: int | None = None
        self._bytes = 0
        self._profile = 0
        self._bound: Binding | None = None
        if usual is None:
            self._reserve(context, int(engine.device_memory_size_v2))
        else:
            self._set_shapes(context, usual)
        self.usual_bytes = self._bytes

    def bind(self, binding: Binding) -> None:
        """The next runs are those of ``binding``. Raises BundleError where TensorRT refuses it, or once closed."""
        if self._bound is binding:
            return
        context, self._bound = self._open(), None
        if binding.profile != self._profile:
            if not context.set_optimization_profile_async(binding.profile, self.device.stream.handle):
                raise BundleError(f"{self.where}: TensorRT refused optimisation profile {binding.profile}")
            self._profile = binding.profile
        self._set_shapes(context, binding.inputs)
        require_shapes(self.where, context, binding.outputs)
        set_addresses(self.where, context, binding.addresses)
        self._bound = binding

    def queue(self, stream: Stream) -> bool:
        """Queues a run of what is bound in ``stream``; whether TensorRT took it."""
        queued: bool = self._open().execute_async_v3(stream.handle)
        return queued

    def close(self) -> None:
        """Frees the activations; a second call does nothing."""
        self._context = None
        memory, self._memory = self._memory, None
        if memory is not None:
            self.device.free(memory)

    def _set_shapes(self, context: trt.IExecutionContext, inputs: Mapping[str, Shape]) -> None:
        """And has the memory that a run at these shapes takes."""
        set_shapes(self.where, context, inputs)
        if not self.stays:
            needed = int(context.update_device_memory_size_for_shapes())
            if needed > self._bytes:
                self._reserve(context, needed)

    def _reserve(self, context: trt.IExecutionContext, size: int) -> None:
        """Memory of ``size`` bytes. No run is queued on what it frees: every run is waited for."""
        before, self._memory, self._bytes = self._memory, None, 0
        if before is not None:
            self.device.free(before)
        self._memory = self.device.allocate(size)
        self._bytes = size
        context.set_device_memory(self._memory, size)

    def _open(self) -> trt.IExecutionContext:
        if self._context is None:
            raise BundleError(f"{self.where}: not open; run it inside its `with` block")
        return self._context


class CacheRun:
    """A call that runs from arrays of the host into arrays of the host, and returns once they are written."""

    def __init__(
        self,
        context: CacheContext,
        bound: CachedRun,
        feeds: Mapping[str, Array],
        outputs: Mapping[str, Array],
        forget: Callable[[CacheRun], None],
    ) -> None:
        """``forget`` is called when the run is closed. Made under the device's lock. Raises BundleIncompatibleError
        where memory is short."""
        layout = bound.layout
        self._context, self._layout, self._forget = context, layout, forget
        self._feeds, self._outputs = feeds, outputs
        self._blocks: Blocks | None = Blocks(layout.bytes)
        self._graph: Graph | None = None
        self._runs = 0
        block = self._blocks.device
        slots = {**layout.inputs, **layout.outputs}
        self._binding = Binding(
            bound.profile,
            {name: slot.shape for name, slot in layout.inputs.items()}
            | {name: array.shape for name, array in bound.read.items()},
            {name: slot.shape for name, slot in layout.outputs.items()}
            | {name: array.shape for name, array in bound.written.items()},
            {name: block + slot.offset for name, slot in slots.items()}
            | {name: array.address for name, array in (*bound.read.items(), *bound.written.items())},
        )

    @property
    def is_captured(self) -> bool:
        """Whether the next run starts as one CUDA graph."""
        return self._graph is not None

    def __call__(self) -> None:
        """Raises BundleError where CUDA or TensorRT fails, or once the run or the engine is closed."""
        device = self._context.device
        with device.lock:
            use_device(device.index)
            blocks = self._blocks
            if blocks is None:
                raise BundleError(f"{self._context.where}: not open; run it inside its `with` block")
            for name, slot in self._layout.inputs.items():
                slot.host_view(blocks.host)[...] = self._feeds[name]
            if self._graph is not None:
                device.stream.start(self._graph)
            else:
                self._context.bind(self._binding)
                if not self._queue(blocks, device.stream):
                    raise BundleError(f"{self._context.where}: TensorRT refused to run")
            device.stream.wait()
            for name, array in self._outputs.items():
                array[...] = self._layout.outputs[name].host_view(blocks.host)
            self._runs += 1
            if self._runs == _CALL_BY_CALL and self._context.stays:  # nothing else has run since, as a capture asks
                self._graph = captured(partial(self._queue, blocks))

    def close(self) -> None:
        """See ``DeviceCall.close``. Nothing of it is queued: every run was waited for."""
        device = self._context.device
        with device.lock:
            blocks, self._blocks = self._blocks, None
            if blocks is None:
                return
            use_device(device.index)
            self._forget(self)
            device.wait()  # a run that was interrupted while it was waited for
            if self._graph is not None:
                self._graph.close()
                self._graph = None
            blocks.close()

    def _queue(self, blocks: Blocks, stream: Stream) -> bool:
        stream.to_device(blocks, self._layout.input_bytes)
        queued = self._context.queue(stream)
        for name in self._outputs:
            slot = self._layout.outputs[name]
            stream.to_host(blocks, slot.offset, slot.bytes)
        return queued
