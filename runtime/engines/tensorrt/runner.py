"""Engines as TensorRT plans: checked before they are opened, given their weights from the store.

An execution context serves one run at a time. There are as many as runs were ever made at once; they share the engine's
weights, and each keeps memory of its own for activations, inputs and outputs. A plan that takes a range of shapes has
one: NVIDIA's pages disagree on whether contexts may share its optimisation profile.

Runs on memory of the caller's, as in a chain of segments, are queued one after the other in the device's stream, and
waited for by nobody here. All of one engine share a context, and so one block of activations. Where TensorRT's work can
be captured, each starts as a CUDA graph of its own, which keeps the addresses that it was captured with until the run
is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial

import tensorrt as trt

from ....bundle.device_files.plan_index import PlanEntry
from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.open_bundle import Bundle
from ....errors import BundleError, InputError
from ...device.cuda_device import CudaDevice, take_cuda_device
from ...device.cuda_memory import Graph, Stream, allocate, free, free_pinned, pinned, use_device
from ...device.device import DeviceArray
from ...device.layout import CopyingRunner, Layout, Layouts
from ...inputs.arrays import Array
from .engine import (
    Log,
    captured,
    captured_in,
    inspected,
    open_context,
    open_plan,
    require_shapes,
    set_addresses,
    set_shapes,
)


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
        return self._context.execute_async_v3(self._stream.handle)


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
        return context.execute_async_v3(stream.handle)

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


class TensorRTRunner(CopyingRunner):
    """One engine on one GPU; see ``DeviceRunner``. ``plan`` may be given by who has just built it."""

    _opened: trt.ICudaEngine | None

    def __init__(self, bundle: Bundle, engine: EngineEntry, device: int = 0, plan: PlanEntry | None = None) -> None:
        super().__init__(bundle, engine)
        self._index, self._plan = device, plan
        self._log = Log()
        self._idle: list[ExecutionContext] = []
        self._lock = threading.Lock()
        self._device: CudaDevice | None = None
        self._bound: BoundContext | None = None

    def __enter__(self) -> TensorRTRunner:
        """Opens the plan. Raises BundleCorruptError or BundleIncompatibleError."""
        self._device = device = take_cuda_device(self._index)
        try:
            # An allocation on a GPU breaks a capture that ONNX Runtime has under way there, in any thread.
            with device.lock:
                use_device(self._index)
                self._opened = opened = self._open()
                self._idle.append(ExecutionContext(self._where, opened, self._layouts))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Closes every context that is idle now, and those at work as soon as they are done."""
        with self._lock:
            self._opened, idle, self._idle = None, self._idle, []
            bound, self._bound = self._bound, None
            device, self._device = self._device, None
        if device is None:
            return
        with device.lock:
            for context in idle:
                context.close()
            if bound is not None:
                bound.close()
        device.release()

    @property
    def device(self) -> CudaDevice:
        return self._require_open()[1]

    def bind_device(self, feeds: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]) -> BoundRun:
        """See ``DeviceRunner.bind_device``; of an engine of one shape alone, as segments are on a GPU."""
        if not self.engine.bucket.is_static:
            raise InputError(f"{self._where}: a run on the GPU's own memory is of one shape; expected a static bucket")
        layout = self._layouts.largest
        self._check(layout.misfit(feeds, outputs))
        device = self.device
        with device.lock, self._lock:
            use_device(self._index)
            opened, _ = self._require_open()  # it may have been closed while another thread held the lock
            if self._bound is None:
                self._bound = BoundContext(self._where, opened, layout, device)
            return self._bound.bind(feeds, outputs)

    def inspect(self) -> str:
        """TensorRT's engine, as the JSON of its engine inspector. Raises BundleError while inactive."""
        return inspected(self._require_open()[0])

    @property
    def is_captured(self) -> bool:
        """Whether runs start as one CUDA graph. Raises BundleError while inactive."""
        self._require_open()
        return all(context.is_captured for context in self._idle)

    @property
    def activation_bytes(self) -> int:
        """Device memory that one run takes beside its inputs and outputs. Raises BundleError while inactive."""
        return int(self._require_open()[0].device_memory_size_v2)

    def _run(self, layout: Layout, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Runs of a range take turns under the device's lock: TensorRT may allocate where a shape is new to it."""
        turn = nullcontext() if self.engine.bucket.is_static else self.device.lock
        with turn, self._execution_context() as context:
            context.run(layout, feeds, outputs)

    @contextmanager
    def _execution_context(self) -> Iterator[ExecutionContext]:
        """An execution context for one run; one that failed is closed, since CUDA's errors stick."""
        use_device(self._index)
        with self._lock:
            opened, device = self._require_open()
            context = self._idle.pop() if self._idle else None
        if context is None:
            with device.lock:
                context = ExecutionContext(self._where, opened, self._layouts)
        try:
            yield context
        except BaseException:
            with device.lock:
                context.close()
            raise
        with self._lock:
            is_open = self._opened is opened
            if is_open:
                self._idle.append(context)
        if not is_open:
            with device.lock:
                context.close()

    def _open(self) -> trt.ICudaEngine:
        interface, own_bytes = (self._inputs, self._returned), self._layouts.largest.bytes
        return open_plan(self._bundle, self.engine, self._plan, self._index, interface, own_bytes, self._log)

    def _require_open(self) -> tuple[trt.ICudaEngine, CudaDevice]:
        opened, device = self._opened, self._device
        if opened is None or device is None:
            raise self._not_open()
        return opened, device
