"""Execution contexts of an engine: one with a stream and memory of its own, and one of runs on memory of its caller's.

Bound runs are queued in the device's stream, and waited for by nobody here. All bound runs of one engine share a
context, and so one block of activations: they follow each other in one stream. Where TensorRT's work can be captured,
each starts as a CUDA graph of its own, which keeps the addresses that it was captured with until the run is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import tensorrt as trt

from ....errors import BundleError
from ...device.cuda_device import CudaDevice
from ...device.cuda_memory import Graph, Stream, allocate, free, free_pinned, pinned, use_device
from ...device.device import DeviceArray
from ...device.layout import Layout, Layouts
from ...inputs.arrays import Array
from .engine import captured, captured_in, open_context, require_shapes, set_addresses, set_shapes


class ExecutionContext:
    """Runs an engine at its one shape, or at any shape of its range, in memory for the largest.

    Inputs go over in one copy. Where there is one shape, the copy and the kernels start as one CUDA graph; where that
    cannot be captured, and for each run of a range, they are queued one by one: a graph is of one shape.
    """

    def __init__(self, where: str, engine: trt.ICudaEngine, layouts: Layouts) -> None:
        """Opens a context and runs it once, on zeros: what TensorRT allocates late must not fall into the capture."""
        self._where, self._is_range = where, not layouts.bucket.is_static
        self._stream = Stream()
        self._block: int | None = None
        self._host: Array | None = None
        self._context: trt.IExecutionContext | None = None
        self._graph: Graph | None = None
        self._layout = layouts.largest
        try:
            self._host = pinned(layouts.largest.bytes)
            self._block = allocate(layouts.largest.bytes)
            self._context = open_context(where, engine)
            self._place(layouts.largest)
            self._host[:] = 0
            if not self._queue():
                raise BundleError(f"{where}: TensorRT refused to run")
            self._stream.wait()
            if not self._is_range:
                self._graph = captured_in(self._stream, lambda _: self._queue())
        except BaseException:
            self.close()
            raise

    @property
    def is_captured(self) -> bool:
        """Whether runs start as one CUDA graph."""
        return self._graph is not None

    def run(self, layout: Layout, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Runs from ``feeds`` into ``outputs``, which both fit ``layout``; an output that is left out stays there.

        Raises BundleError where CUDA or TensorRT fails; the context is of no use afterwards.
        """
        host, block = self._host, self._block
        if host is None or block is None:
            raise BundleError(f"{self._where}: not open; run it inside its `with` block")
        if layout != self._layout:
            self._place(layout)
        layout.fill(host, feeds)
        if self._graph is not None:
            self._graph.launch()
        elif not self._queue():
            raise BundleError(f"{self._where}: TensorRT refused to run")
        for name in outputs:
            slot = layout.outputs[name]
            self._stream.to_host(slot.host_view(host), block + slot.offset)
        self._stream.wait()
        layout.read(host, outputs)

    def close(self) -> None:
        """Frees everything; a second call does nothing."""
        host, self._host, block, self._block = self._host, None, self._block, None
        if self._graph is not None:
            self._graph.close()
            self._graph = None
        self._context = None
        self._stream.close()
        if block is not None:
            free(block)
        if host is not None:
            free_pinned(host)

    def _place(self, layout: Layout) -> None:
        """Sets where TensorRT finds tensors from now on and, in a range, their shapes."""
        context, block = self._context, self._block
        assert context is not None
        assert block is not None
        if self._is_range:
            set_shapes(self._where, context, {name: slot.shape for name, slot in layout.inputs.items()})
            require_shapes(self._where, context, {name: slot.shape for name, slot in layout.outputs.items()})
        slots = {**layout.inputs, **layout.outputs}
        set_addresses(self._where, context, {name: block + slot.offset for name, slot in slots.items()})
        self._layout = layout

    def _queue(self) -> bool:
        assert self._block is not None
        assert self._host is not None
        assert self._context is not None
        self._stream.to_device(self._block, self._host[: self._layout.input_bytes])
        queued: bool = self._context.execute_async_v3(self._stream.handle)
        return queued


class BoundContext:
    """The context of all bound runs of ``engine``, with room for the outputs that they do not keep."""

    def __init__(self, where: str, engine: trt.ICudaEngine, layout: Layout, device: CudaDevice) -> None:
        """Raises BundleError where TensorRT opens none, BundleIncompatibleError where memory is short."""
        self.where, self.layout, self.device = where, layout, device
        self._context: trt.IExecutionContext | None = open_context(where, engine)
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
        set_addresses(self.where, context, addresses)
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
        self._graph = captured(partial(context.queue, addresses))

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
