"""The execution context of an engine that keeps a cache: one for steps and chunks, in the device's stream.

It changes between the optimisation profiles of its plan. Its activations lie in memory of ours, so that CUDA graphs
which were captured with it stay valid when it changes: they hold the addresses that they were captured with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tensorrt as trt

from ....errors import BundleError
from ...bundle.shape_profile import Shape
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

    def __init__(self, where: str, engine: trt.ICudaEngine, device: CudaDevice) -> None:
        """Raises BundleError where TensorRT opens none, BundleIncompatibleError where memory is short."""
        self.where, self.device = where, device
        context: trt.IExecutionContext | None = engine.create_execution_context(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if context is None:
            raise BundleError(f"{where}: TensorRT opened no context; the GPU may have too little free memory")
        size = int(engine.device_memory_size_v2)
        self._memory = device.allocate(size)
        context.set_device_memory(self._memory, size)
        self._context: trt.IExecutionContext | None = context
        self._profile = 0
        self._bound: Binding | None = None

    def bind(self, binding: Binding) -> None:
        """The next runs are those of ``binding``. Raises BundleError where TensorRT refuses it, or once closed."""
        if self._bound is binding:
            return
        context, self._bound = self._open(), None
        if binding.profile != self._profile:
            if not context.set_optimization_profile_async(binding.profile, self.device.stream.handle):
                raise BundleError(f"{self.where}: TensorRT refused optimisation profile {binding.profile}")
            self._profile = binding.profile
        for name, shape in binding.inputs.items():
            if not context.set_input_shape(name, trt.Dims(list(shape))):
                raise BundleError(f"{self.where}: TensorRT refused shape {list(shape)} of {name}")
        if unknown := context.infer_shapes():
            raise BundleError(f"{self.where}: TensorRT does not know the shape of {', '.join(unknown)}")
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
        if self._context is not None:
            self._context = None
            self.device.free(self._memory)

    def _open(self) -> trt.IExecutionContext:
        if self._context is None:
            raise BundleError(f"{self.where}: not open; run it inside its `with` block")
        return self._context
