"""Engines that generate, in ONNX Runtime on a device: what they keep of tokens stays there, in memory of the caller's.

The graphs are those for TensorRT, whose caches have one capacity: a cache is input and output of a session at one
address, so that a run copies new tokens over and logits back. Steps, which repeat, start as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ....bundle.entries.engine_entry import EngineEntry
from ....bundle.open_bundle import Bundle
from ...device.cached_layout import CachedRun, CachedRunner, HostRun
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

    def _bind(self, bound: CachedRun, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> GpuCacheRun:
        if self._opened is None:
            raise self._not_open()
        session, captures = self._opened.session, self._provider.captures
        return GpuCacheRun(self._where, self.device, session, bound, feeds, outputs, captures, self._runs.discard)

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


class GpuCacheRun(HostRun):
    """A run of a session, whose kernels start as one CUDA graph between the copies."""

    def __init__(
        self,
        where: str,
        device: Device,
        session: GpuSession,
        bound: CachedRun,
        feeds: Mapping[str, Array],
        outputs: Mapping[str, Array],
        captures: bool,
        forget: Callable[[HostRun], None],
    ) -> None:
        self._session, self._captures = session, captures
        super().__init__(where, device, bound, feeds, outputs, forget)

    def _place(self, bound: CachedRun) -> None:
        inputs, made = (
            {name: DeviceArray(self._block + slot.offset, slot.dtype, slot.shape) for name, slot in slots.items()}
            for slots in (self._layout.inputs, self._layout.outputs)
        )
        session = self._session
        binding = session.binding({**inputs, **bound.read}.items(), {**made, **bound.written}.items())
        self._run = BoundRun(self._where, self._device, session, binding, self._captures, lambda _: None)

    @property
    def is_captured(self) -> bool:
        return self._run.is_captured

    def _queue(self) -> None:
        device, slots = self._device, self._layout.outputs
        device.to_device(self._block, self._staging[: self._layout.input_bytes])
        self._run()
        for name in self._outputs:
            device.to_host(slots[name].host_view(self._staging), self._block + slots[name].offset)

    def _release(self) -> None:
        self._run.close()
