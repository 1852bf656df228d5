"""Engines in ONNX Runtime on a device: weights as views of its store, inputs and outputs bound to memory of its own.

All engines of a device queue their work in one stream, one run at a time. Runs that repeat start as one CUDA graph
where their kernels can be captured; ``OnnxRuntimeGpuRunner`` says whether, and why not. Runs of an engine of a range
are bound at their own shape, in memory for the largest, and captured where one shape comes again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.open_bundle import Bundle
from ....errors import BundleError, BundleIncompatibleError, InputError
from ...device.device import Device, DeviceArray
from ...device.layout import CopyingRunner, Layout
from ...inputs.arrays import Array
from .provider import Provider
from .session import CALL_BY_CALL, BoundRun, GpuSession, OpenEngine


class OnnxRuntimeGpuRunner(CopyingRunner):
    """One engine as one session on ``provider``'s device; see ``DeviceRunner``."""

    def __init__(self, bundle: Bundle, engine: EngineEntry, provider: Provider) -> None:
        super().__init__(bundle, engine)
        self._provider = provider
        self._device: Device | None = None
        self._open_engine: OpenEngine | None = None
        self._block: int | None = None
        self._staging: Array | None = None
        self._placed = self._layouts.largest
        self._own: BoundRun | None = None
        self._bound: set[BoundRun] = set()

    def __enter__(self) -> OnnxRuntimeGpuRunner:
        """Opens the session and runs it once, on zeros, so that what cannot run is found here.

        Raises BundleCorruptError or BundleIncompatibleError.
        """
        self._device = device = self._provider.take()
        try:
            with device.lock:
                self._block = device.allocate(self._layouts.largest.bytes)
                self._staging = device.staging(self._layouts.largest.bytes)
                self._staging[:] = 0
                self._open_engine = OpenEngine(self._bundle, self.engine, self._provider, device)
                self._opened = object()  # not the session: callers may keep calls longer than what sessions read
                self._place(self._open_engine.session, self._layouts.largest)
                self._warm_up(device)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it once the run that is under way is done."""
        device, self._device = self._device, None
        if device is None:
            return
        bound, self._bound = self._bound, set()
        engine, self._open_engine = self._open_engine, None
        block, self._block = self._block, None
        staging, self._staging = self._staging, None
        self._own = self._opened = None
        with ExitStack() as stack:  # what fails keeps nothing else from being given back
            stack.callback(device.release)
            stack.enter_context(device.lock)
            if staging is not None:
                stack.callback(device.free_staging, staging)
            if block is not None:
                stack.callback(device.free, block)
            if engine is not None:
                stack.callback(engine.close)
            for one in bound:  # those who made them may still hold them
                stack.callback(one.drop)
            device.wait()

    @property
    def device(self) -> Device:
        return self._require_open()[0]

    @property
    def is_captured(self) -> bool:
        """Whether its own runs start as one CUDA graph. Raises BundleError while inactive."""
        self._require_open()
        return self._own is not None and self._own.is_captured

    @property
    def capture_refusal(self) -> str | None:
        """Why its own runs could not be captured, in one line. Raises BundleError while inactive."""
        self._require_open()
        return None if self._own is None else self._own.refusal

    def bind_device(self, feeds: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]) -> BoundRun:
        self._check(self._layouts.of(feeds).misfit(feeds, outputs))
        device, _ = self._require_open()
        with device.lock:
            _, session = self._require_open()  # it may have been closed while another thread held the lock
            return self._bind(session, feeds, outputs)

    def _warm_up(self, device: Device) -> None:
        """Runs it on zeros, so that what cannot run is found here, and requests of a static bucket start as a graph."""
        try:
            for _ in range(CALL_BY_CALL if self.engine.bucket.is_static else 1):
                self._queue_own(device)
            assert self._own is not None
            assert self._staging is not None
            for slot in self._placed.inputs.values():  # on ones, for what the graph leaves out it had before
                slot.host_view(self._staging)[...] = 1
            self._upload(device)
            self._own.prove_graph(lambda: self._outputs_on(device))
            device.wait()
        except (InputError, BundleError) as failure:  # on zeros, so it is not the input
            raise BundleIncompatibleError(str(failure)) from failure

    def _bind(
        self, session: GpuSession, feeds: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]
    ) -> BoundRun:
        assert self._device is not None
        binding = session.binding(feeds.items(), outputs.items())
        bound = BoundRun(self._where, self._device, session, binding, self._provider.captures, self._bound.discard)
        self._bound.add(bound)
        return bound

    def _run(self, layout: Layout, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        device, _ = self._require_open()
        with device.lock:
            _, session = self._require_open()  # it may have been closed while another run was under way
            assert self._staging is not None
            assert self._block is not None
            if layout != self._placed or self._own is None:
                self._place(session, layout)
            layout.fill(self._staging, feeds)
            self._queue_own(device)
            for name in outputs:
                slot = layout.outputs[name]
                device.to_host(slot.host_view(self._staging), self._block + slot.offset)
            device.wait()
            layout.read(self._staging, outputs)

    def _place(self, session: GpuSession, layout: Layout) -> None:
        """Binds the runner's own runs to its memory, where ``layout`` says."""
        assert self._block is not None
        if self._own is not None:
            self._own.close()
            self._own = None
        inputs, outputs = (
            {name: DeviceArray(self._block + slot.offset, slot.dtype, slot.shape) for name, slot in slots.items()}
            for slots in (layout.inputs, layout.outputs)
        )
        self._own, self._placed = self._bind(session, inputs, outputs), layout

    def _queue_own(self, device: Device) -> None:
        assert self._own is not None
        self._upload(device)
        self._own()

    def _upload(self, device: Device) -> None:
        assert self._staging is not None
        assert self._block is not None
        device.to_device(self._block, self._staging[: self._placed.input_bytes])

    def _outputs_on(self, device: Device) -> bytes:
        """All of its own outputs as they lie on the device, once it has run."""
        found = []
        for slot in self._placed.outputs.values():
            array = np.empty(slot.shape, slot.dtype)
            assert self._block is not None
            device.to_host(array, self._block + slot.offset)
            device.wait()
            found.append(array.tobytes())
        return b"".join(found)

    def _require_open(self) -> tuple[Device, GpuSession]:
        device, engine = self._device, self._open_engine
        if device is None or engine is None:
            raise self._not_open()
        return device, engine.session
