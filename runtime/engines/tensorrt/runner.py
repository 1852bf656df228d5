"""Engines as TensorRT plans: checked before they are opened, given their weights from the store.

An execution context (contexts.py) serves one run at a time. There are as many as runs were ever made at once; they
share the engine's weights, and each keeps memory of its own for activations, inputs and outputs. A plan that takes a
range of shapes has one: NVIDIA's pages disagree on whether contexts may share its optimisation profile. Runs on memory
of the caller's, as in a chain of segments, are queued one after the other in the device's stream (BoundRun there).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import tensorrt as trt

from ....bundle.device_files.plan_index import PlanEntry
from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.open_bundle import Bundle
from ....errors import InputError
from ...device.cuda_device import CudaDevice, take_cuda_device
from ...device.cuda_memory import use_device
from ...device.device import DeviceArray
from ...device.layout import CopyingRunner, Layout
from ...inputs.arrays import Array
from .contexts import BoundContext, BoundRun, ExecutionContext
from .engine import Log, inspected, open_plan


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
