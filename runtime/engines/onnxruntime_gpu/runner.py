"""Engines in ONNX Runtime on a device: weights as views of its store, inputs and outputs bound to memory of its own.

All engines of a device queue their work in one stream, one run at a time. Where ONNX Runtime can capture an engine's
kernels as a CUDA graph, a run starts as one; ``OnnxRuntimeGpuRunner`` says whether, and why not. A graph is of one
shape, so none is requested where an engine takes a range: runs are bound at their own shape, in memory for the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.manifest import WEIGHTS_NAME
from ....bundle.open_bundle import Bundle
from ....bundle.shape_profile import shape_profile
from ....errors import BundleCorruptError, BundleError, BundleIncompatibleError, InputError
from ...device.device import Device, DeviceArray
from ...device.layout import CopyingRunner, Layout
from ...device.store import DeviceView, StoreUse
from ...graphs.weight_store import store_initializers
from ...inputs.arrays import Array
from .provider import Provider
from .session import CALL_BY_CALL, BoundRun, GpuSession, is_short_of_memory

# CUDA graphs that a session may keep: some hundred kilobytes each, until it closes.
_MAX_CAPTURED_GRAPHS = 64


class OnnxRuntimeGpuRunner(CopyingRunner):
    """One engine as one session on ``provider``'s device; see ``DeviceRunner``."""

    def __init__(self, bundle: Bundle, engine: EngineEntry, provider: Provider) -> None:
        super().__init__(bundle, engine)
        self._provider = provider
        self._device: Device | None = None
        self._store: StoreUse | None = None
        self._session: GpuSession | None = None
        self._block: int | None = None
        self._staging: Array | None = None
        self._placed = self._layouts.largest
        self._own: BoundRun | None = None
        self._bound: set[BoundRun] = set()
        self._graphs: dict[tuple[tuple[str, int], ...], int] = {}
        self._captures = False
        self._refusal: str | None = None

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
                with self._bundle.held(self.engine.file, WEIGHTS_NAME):
                    self._open(device, self._views(device))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it once the run that is under way is done."""
        device, self._device = self._device, None
        if device is None:
            return
        with device.lock:
            self._close_session()
            if self._store is not None:
                self._store.close()
                self._store = None
            if self._block is not None:
                device.free(self._block)
                self._block = None
            if self._staging is not None:
                device.free_staging(self._staging)
                self._staging = None
        device.release()

    @property
    def device(self) -> Device:
        return self._require_open()[0]

    @property
    def is_captured(self) -> bool:
        """Whether runs start as one CUDA graph. Raises BundleError while inactive."""
        self._require_open()
        return self._captures

    @property
    def capture_refusal(self) -> str | None:
        """ONNX Runtime's message where it could not capture runs, in one line. Raises BundleError while inactive."""
        self._require_open()
        return self._refusal

    def bind_device(self, feeds: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]) -> BoundRun:
        self._check(self._layouts.of(feeds).misfit(feeds, outputs))
        device, _ = self._require_open()
        with device.lock:
            _, session = self._require_open()  # it may have been closed while another thread held the lock
            return self._bind(session, feeds, outputs)

    def _views(self, device: Device) -> dict[str, DeviceView]:
        initializers = store_initializers(self._bundle, self.engine)
        if not initializers or not self._provider.shares:
            return {}
        self._store = StoreUse(self._bundle.file(WEIGHTS_NAME), device)
        return self._store.store.views(initializers, str(self._bundle.file(self.engine.file)))

    def _open(self, device: Device, views: Mapping[str, DeviceView]) -> None:
        """Opens it captured where that is possible: ONNX Runtime says so when a session opens or in its first run."""
        self._refusal = None
        captures = self._provider.captures and self.engine.bucket.is_static
        try:
            self._start(device, views, captures)
        except BundleIncompatibleError as refusal:
            if not captures or is_short_of_memory(str(refusal)):
                raise
            self._close_session()
            self._start(device, views, captures=False)
            self._refusal = str(refusal)

    def _start(self, device: Device, views: Mapping[str, DeviceView], captures: bool) -> None:
        path = self._bundle.file(self.engine.file)
        folder = self._provider.cache_folder(self._bundle, self.engine)
        if folder is not None:  # what is built is kept by these hashes, so they must be those of the bytes
            self._bundle.require_hashes(self.engine.file, WEIGHTS_NAME)
        bucket = self.engine.bucket
        shapes = shape_profile(self._bundle.manifest, bucket).written(self._inputs)
        options = self._provider.options(device, captures, folder, shapes)
        self._captures = captures
        self._session = GpuSession(path, self._provider, device, views, options, is_range=not bucket.is_static)
        self._check_interface(self._session.session)
        self._opened = object()  # not the session: callers may keep calls longer than the memory that sessions read
        self._place(self._session, self._layouts.largest)
        try:
            self._queue_own(device)
            device.wait()
        except (InputError, BundleError) as failure:  # on zeros, so it is not the input
            raise BundleIncompatibleError(str(failure)) from failure

    def _close_session(self) -> None:
        """Bound calls let go of it too: those who made them may still hold them."""
        for bound in self._bound:
            bound.drop()
        self._bound.clear()
        self._graphs.clear()
        self._own = self._session = self._opened = None

    def _bind(
        self, session: GpuSession, feeds: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]
    ) -> BoundRun:
        assert self._device is not None
        binding = session.binding(feeds.items(), outputs.items())
        graph = self._graph_for((*feeds.items(), *outputs.items())) if self._captures else None
        bound = BoundRun(self._where, self._device, session, binding, graph, self._bound.discard)
        self._bound.add(bound)
        return bound

    def _graph_for(self, arrays: Sequence[tuple[str, DeviceArray]]) -> int:
        """The number of the graph that reads and writes these addresses, which no other may be started for. It outlives
        the binding that it was captured with, so that the next one at the same places starts it."""
        places = tuple((name, array.address) for name, array in arrays)
        if places not in self._graphs and len(self._graphs) == _MAX_CAPTURED_GRAPHS:
            return CALL_BY_CALL
        return self._graphs.setdefault(places, len(self._graphs) + 1)

    def _run(self, layout: Layout, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        device, _ = self._require_open()
        with device.lock:
            _, session = self._require_open()  # it may have been closed while another run was under way
            assert self._staging is not None
            assert self._block is not None
            if layout != self._placed:
                self._place(session, layout)
            for name, slot in layout.inputs.items():
                slot.host_view(self._staging)[...] = feeds[name]
            self._queue_own(device)
            for name in outputs:
                slot = layout.outputs[name]
                device.to_host(slot.host_view(self._staging), self._block + slot.offset)
            device.wait()
            for name, array in outputs.items():
                array[...] = layout.outputs[name].host_view(self._staging)

    def _place(self, session: GpuSession, layout: Layout) -> None:
        """Binds the runner's own runs to its memory, where ``layout`` says."""
        assert self._block is not None
        if self._own is not None:
            self._own.close()
        inputs, outputs = (
            {name: DeviceArray(self._block + slot.offset, slot.dtype, slot.shape) for name, slot in slots.items()}
            for slots in (layout.inputs, layout.outputs)
        )
        self._own, self._placed = self._bind(session, inputs, outputs), layout

    def _queue_own(self, device: Device) -> None:
        assert self._staging is not None
        assert self._block is not None
        assert self._own is not None
        device.to_device(self._block, self._staging[: self._placed.input_bytes])
        self._own()

    def _check_interface(self, session: Any) -> None:
        """The session has exactly the manifest's inputs, outputs and routes; ONNX Runtime checks their types."""
        for kind, found, specs in (
            ("input", session.get_inputs(), self._inputs),
            ("output", session.get_outputs(), self._returned),
        ):
            have = {tensor.name: tuple(tensor.shape) for tensor in found}
            want = {spec.name: spec.declared(self.engine.bucket) for spec in specs}
            if have != want:
                raise BundleCorruptError(f"{self._where}: {kind}s are {have}, the manifest says {want}")

    def _require_open(self) -> tuple[Device, GpuSession]:
        device, session = self._device, self._session
        if device is None or session is None:
            raise self._not_open()
        return device, session
