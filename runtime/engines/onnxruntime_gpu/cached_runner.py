"""Engines that generate, in ONNX Runtime on a device: what they keep of tokens stays there, in memory of the caller's.

The graphs are those for TensorRT, whose caches have one capacity: a cache is input and output of a session at one
address, so that a run copies new tokens over and logits back. Steps, which repeat, start as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.open_bundle import Bundle
from ....errors import BundleError
from ...device.cached_layout import CachedRun, CachedRunner
from ...device.device import Device, DeviceArray
from ...inputs.arrays import Array
from .prove import require_equal
from .provider import Provider
from .session import BoundRun, GpuSession, OpenEngine


class OnnxRuntimeGpuCacheRunner(CachedRunner):
    """One engine as one session on ``provider``'s device; see ``CacheRunner``."""

    def __init__(self, bundle: Bundle, engine: EngineEntry, provider: Provider, threads: int) -> None:
        """``threads`` of the processor compare it."""
        super().__init__(bundle, engine)
        self._provider, self._threads = provider, threads
        self._opened: OpenEngine | None = None
        self._runs: set[GpuCacheRun] = set()

    def __enter__(self) -> OnnxRuntimeGpuCacheRunner:
        """Opens the session, and compares it with the processor. Raises BundleCorruptError or
        BundleIncompatibleError."""
        self._device = device = self._provider.take()
        try:
            with device.lock:
                self._opened = OpenEngine(self._bundle, self.engine, self._provider, device)
            require_equal(self._bundle, self.engine, self.bind_cache, device, self._threads)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Closes every run that is bound; they fail afterwards."""
        device, self._device = self._device, None
        if device is None:
            return
        opened, self._opened = self._opened, None
        with ExitStack() as stack:  # what fails keeps nothing else from being given back
            stack.callback(device.release)
            stack.enter_context(device.lock)
            if opened is not None:
                stack.callback(opened.close)
            for run in tuple(self._runs):
                stack.callback(run.close)

    def bind_cache(
        self, feeds: Mapping[str, Array], outputs: Mapping[str, Array], caches: Mapping[str, DeviceArray]
    ) -> GpuCacheRun:
        bound = self._layouts.run(feeds, outputs, caches)
        with self.device.lock:
            if self._opened is None:  # closed while another thread held the lock
                raise self._not_open()
            captures = self._provider.captures
            run = GpuCacheRun(
                self._where, self.device, self._opened.session, bound, feeds, outputs, captures, self._runs.discard
            )
            self._runs.add(run)
            return run


class GpuCacheRun:
    """A call that runs from arrays of the host into arrays of the host, and returns once they are written."""

    def __init__(
        self,
        where: str,
        device: Device,
        session: GpuSession,
        bound: CachedRun,
        feeds: Mapping[str, Array],
        outputs: Mapping[str, Array],
        captures: bool,
        forget: Callable[[GpuCacheRun], None],
    ) -> None:
        """``forget`` is called when the run is closed. Made under the device's lock. Raises BundleIncompatibleError
        where memory is short."""
        self._where, self._device, self._layout, self._forget = where, device, bound.layout, forget
        self._feeds, self._outputs = feeds, outputs
        self._block: int | None = None
        with ExitStack() as stack:
            block = device.allocate(self._layout.bytes)
            stack.callback(device.free, block)
            self._staging = device.staging(self._layout.bytes)
            stack.callback(device.free_staging, self._staging)
            inputs, made = (
                {name: DeviceArray(block + slot.offset, slot.dtype, slot.shape) for name, slot in slots.items()}
                for slots in (self._layout.inputs, self._layout.outputs)
            )
            binding = session.binding({**inputs, **bound.read}.items(), {**made, **bound.written}.items())
            self._run = BoundRun(where, device, session, binding, captures, lambda _: None)
            self._block = block
            stack.pop_all()

    @property
    def is_captured(self) -> bool:
        """Whether the next run starts as one CUDA graph."""
        return self._run.is_captured

    def __call__(self) -> None:
        """Raises BundleError where the GPU fails, or once the run or the engine is closed."""
        device = self._device
        with device.lock:
            if self._block is None:
                raise BundleError(f"{self._where}: not open; run it inside its `with` block")
            for name, slot in self._layout.inputs.items():
                slot.host_view(self._staging)[...] = self._feeds[name]
            device.to_device(self._block, self._staging[: self._layout.input_bytes])
            self._run()
            for name in self._outputs:
                slot = self._layout.outputs[name]
                device.to_host(slot.host_view(self._staging), self._block + slot.offset)
            device.wait()
            for name, array in self._outputs.items():
                array[...] = self._layout.outputs[name].host_view(self._staging)

    def close(self) -> None:
        """See ``DeviceCall.close``."""
        device = self._device
        with ExitStack() as stack:
            stack.enter_context(device.lock)
            block, self._block = self._block, None
            if block is None:
                return
            stack.callback(device.free_staging, self._staging)
            stack.callback(device.free, block)
            stack.callback(self._forget, self)
            self._run.close()  # waits for a run that was interrupted
