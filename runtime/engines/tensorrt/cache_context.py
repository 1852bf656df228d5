"""The execution context of an engine that generates: one for steps and chunks, in the device's stream.

It changes between the optimisation profiles of its plan. Its activations lie in memory of ours, so that CUDA graphs
which were captured with it stay valid when it changes: they hold the addresses that they were captured with. Those of a
prompt, which grow by the square of its length, take what the longest one so far needs, and runs of it are not captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tensorrt as trt

from ....bundle.shape_profile import Shape
from ....errors import BundleError
from ...device.cuda_device import CudaDevice
from ...device.cuda_memory import Stream


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
        context: trt.IExecutionContext | None = engine.create_execution_context(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if context is None:
            raise BundleError(f"{where}: TensorRT opened no context; the GPU may have too little free memory")
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
        for name, shape in binding.outputs.items():
            found = tuple(context.get_tensor_shape(name))
            if found != shape:
                raise BundleError(f"{self.where}: {name}: expected shape {list(shape)}, got {list(found)}")
        for name, address in binding.addresses.items():
            if not context.set_tensor_address(name, address):
                raise BundleError(f"{self.where}: TensorRT refused the memory of {name}")
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
        for name, shape in inputs.items():
            if not context.set_input_shape(name, trt.Dims(list(shape))):
                raise BundleError(f"{self.where}: TensorRT refused shape {list(shape)} of {name}")
        if unknown := context.infer_shapes():
            raise BundleError(f"{self.where}: TensorRT does not know the shape of {', '.join(unknown)}")
        if not self.stays:
            needed = int(context.update_device_memory_size_for_shapes())
            if needed > self._bytes:
                self._reserve(context, needed)

    def _reserve(self, context: trt.IExecutionContext, size: int) -> None:
        """Of one that has memory already no run is queued: every run is waited for."""
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
