"""Runs of an engine on memory of its caller's on the GPU: queued in the device's stream, and waited for by nobody here.

All bound runs of one engine share a context, and so one block of activations: they follow each other in one stream.
Where TensorRT's work can be captured, each starts as a CUDA graph of its own, which keeps the addresses that it was
captured with until the run is closed.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorrt as trt

from ....errors import BundleError
from ...device.cuda_device import CudaDevice
from ...device.cuda_memory import Graph, Stream, use_device
from ...device.device import DeviceArray
from ...device.layout import Layout


class BoundContext:
    """The context of all bound runs of ``engine``, with room for the outputs that they do not keep."""

    def __init__(self, where: str, engine: trt.ICudaEngine, layout: Layout, device: CudaDevice) -> None:
        """Raises BundleError where TensorRT opens none, BundleIncompatibleError where memory is short."""
        self.where, self.layout, self.device = where, layout, device
        context: trt.IExecutionContext | None = engine.create_execution_context()
        if context is None:
            raise BundleError(f"{where}: TensorRT opened no context; the GPU may have too little free memory")
        self._context: trt.IExecutionContext | None = context
        self.block = device.allocate(layout.bytes)
        self._runs: set[BoundRun] = set()

    def bind(self, feeds: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]) -> BoundRun:
        """A run from ``feeds`` into ``outputs``, which fit the layout."""
        addresses = {name: self.block + slot.offset for name, slot in self.layout.outputs.items()}
        addresses |= {name: array.address for name, array in (*feeds.items(), *outputs.items())}
        with self.device.lock:
            run = BoundRun(self, addresses)
            self._runs.add(run)
        return run

    def forget(self, run: BoundRun) -> None:
        """Called by a run that was closed."""
        self._runs.discard(run)

    def queue(self, addresses: Mapping[str, int], stream: Stream) -> bool:
        """Queues a run at ``addresses``; whether TensorRT took it. Raises BundleError once closed."""
        context = self._context
        if context is None:
            raise BundleError(f"{self.where}: not open; run it inside its `with` block")
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise BundleError(f"{self.where}: TensorRT refused the memory of {name}")
        queued: bool = context.execute_async_v3(stream.handle)
        return queued

    def close(self) -> None:
        """Frees everything once what is queued is done; bound runs fail afterwards."""
        with self.device.lock:
            if self._context is not None:
                self.device.wait()
                for run in tuple(self._runs):
                    run.close()
                self._context = None
                self.device.free(self.block)


class BoundRun:
    """A call that queues one run."""

    def __init__(self, context: BoundContext, addresses: Mapping[str, int]) -> None:
        """Runs once, in the caller's memory: what TensorRT allocates late must not fall into the capture."""
        self._context, self._addresses = context, addresses
        self._graph: Graph | None = None
        self._closed = False
        self._queue()
        context.device.wait()
        # Of its own: other threads may queue work in the device's stream, which must not be captured.
        stream = Stream()
        try:
            self._graph = stream.capture(lambda: context.queue(addresses, stream))
        finally:
            stream.close()

    @property
    def is_captured(self) -> bool:
        """Whether the run starts as one CUDA graph."""
        return self._graph is not None

    def __call__(self) -> None:
        """Raises BundleError where CUDA or TensorRT fails, or once the engine is closed."""
        device = self._context.device
        with device.lock:
            use_device(device.index)
            if self._closed:
                raise BundleError(f"{self._context.where}: not open; run it inside its `with` block")
            if self._graph is not None:
                device.stream.start(self._graph)
            else:
                self._queue()

    def close(self) -> None:
        """See ``DeviceCall.close``."""
        device = self._context.device
        with device.lock:
            if self._closed:
                return
            self._closed = True
            self._context.forget(self)
            device.wait()  # its graph may be running
            if self._graph is not None:
                self._graph.close()
                self._graph = None

    def _queue(self) -> None:
        if not self._context.queue(self._addresses, self._context.device.stream):
            raise BundleError(f"{self._context.where}: TensorRT refused to run")
