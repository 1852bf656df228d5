"""Engines that generate, as TensorRT plans: what they keep of tokens stays on the GPU, in memory of the caller's.

A plan updates a cache in place: its input and its output are bound to one address, so that a run copies new tokens over
and logits back. The encoder's answer to a prompt is an output there, and an input of the decoder's
plan. All runs of an engine are queued in the device's stream, one after the other.

The execution context changes between the optimisation profiles of its plan, for steps and chunks, in that stream. Its
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

import tensorrt as trt

from ....bundle.device_files.plan_index import PlanEntry
from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.entries.generation_entry import ENCODER
from ....bundle.open_bundle import Bundle
from ....bundle.shape_profile import Shape
from ....errors import BundleError
from ...device.cached_layout import CachedRun, CachedRunner, HostRun
from ...device.cuda_device import CudaDevice, take_cuda_device
from ...device.cuda_memory import Graph, Stream, use_device
from ...inputs.arrays import Array
from .engine import Log, captured, inspected, open_context, open_plan, require_shapes, set_addresses, set_shapes

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
        return self._open().execute_async_v3(stream.handle)

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


class CacheRun(HostRun):
    """A run of a plan; copies and kernels are one CUDA graph."""

    def __init__(
        self,
        context: CacheContext,
        bound: CachedRun,
        feeds: Mapping[str, Array],
        outputs: Mapping[str, Array],
        forget: Callable[[HostRun], None],
    ) -> None:
        self._context = context
        self._graph: Graph | None = None
        self._runs = 0
        super().__init__(context.where, context.device, bound, feeds, outputs, forget)

    def _place(self, bound: CachedRun) -> None:
        layout = bound.layout
        slots = {**layout.inputs, **layout.outputs}
        self._binding = Binding(
            bound.profile,
            {name: slot.shape for name, slot in layout.inputs.items()}
            | {name: array.shape for name, array in bound.read.items()},
            {name: slot.shape for name, slot in layout.outputs.items()}
            | {name: array.shape for name, array in bound.written.items()},
            {name: self._block + slot.offset for name, slot in slots.items()}
            | {name: array.address for name, array in (*bound.read.items(), *bound.written.items())},
        )

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def _queue(self) -> None:
        """Raises BundleError where TensorRT refuses."""
        device = self._context.device
        use_device(device.index)
        if self._graph is not None:
            device.stream.start(self._graph)
            return
        self._context.bind(self._binding)
        if not self._queue_in(device.stream):
            raise BundleError(f"{self._where}: TensorRT refused to run")

    def _ran(self) -> None:
        self._runs += 1
        if self._runs == _CALL_BY_CALL and self._context.stays:  # nothing else has run since, as a capture asks
            self._graph = captured(self._queue_in)

    def _release(self) -> None:
        self._context.device.wait()  # for a run that was interrupted while it was waited for
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def _queue_in(self, stream: Stream) -> bool:
        stream.to_device(self._block, self._staging[: self._layout.input_bytes])
        queued = self._context.queue(stream)
        for name in self._outputs:
            slot = self._layout.outputs[name]
            stream.to_host(slot.host_view(self._staging), self._block + slot.offset)
        return queued


class TensorRTCacheRunner(CachedRunner):
    """One engine on one GPU; see ``CacheRunner``. ``plan`` may be given by who has just built it."""

    def __init__(self, bundle: Bundle, engine: EngineEntry, device: int = 0, plan: PlanEntry | None = None) -> None:
        super().__init__(bundle, engine)
        self._index, self._plan = device, plan
        self._log = Log()
        self._opened: trt.ICudaEngine | None = None
        self._context: CacheContext | None = None

    def __enter__(self) -> TensorRTCacheRunner:
        """Opens the plan. Raises BundleCorruptError or BundleIncompatibleError."""
        self._device = device = take_cuda_device(self._index)
        try:
            with device.lock:
                use_device(self._index)
                self._opened = opened = open_plan(
                    self._bundle,
                    self.engine,
                    self._plan,
                    self._index,
                    self._layouts.interface,
                    self._layouts.smallest.bytes,
                    self._log,
                )
                profile = self._layouts.profiles[0]
                usual = {spec.name: profile.shapes(spec)[1] for spec in self._layouts.inputs}
                self._context = CacheContext(
                    self._where, opened, device, usual if self.engine.segment == ENCODER else None
                )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _bind(self, bound: CachedRun, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> CacheRun:
        use_device(self._index)
        if self._context is None:
            raise self._not_open()
        return CacheRun(self._context, bound, feeds, outputs, self._runs.discard)

    def _close(self) -> None:
        if self._context is not None:
            self._context.close()
        self._opened = self._context = None

    def inspect(self) -> str:
        """TensorRT's engine, as the JSON of its engine inspector. Raises BundleError while inactive."""
        return inspected(self._require_open())

    @property
    def activation_bytes(self) -> int:
        """Device memory that one run takes beside its inputs and outputs, of a prompt a usual one. Raises BundleError
        while inactive."""
        self._require_open()
        assert self._context is not None
        return self._context.usual_bytes

    def _require_open(self) -> trt.ICudaEngine:
        if self._opened is None:
            raise self._not_open()
        return self._opened
