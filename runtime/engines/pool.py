"""The open engines of one model: each is opened once, by the first request that needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from ...errors import BundleError
from ..bundle.manifest import EngineEntry
from ..bundle.open_bundle import Bundle
from ..device.device import Device
from .contract.residency import Residency
from .onnxruntime_gpu.provider import Provider
from .runner import Runner, device_source, runnable_engines, runner_for


class EnginePool:
    """Opens engines on demand and closes them all together; engines of one file are one. Thread-safe.

    With a ``provider`` their graphs run in ONNX Runtime on it, else each engine runs on its backend.
    """

    def __init__(
        self,
        bundle: Bundle,
        residencies: Mapping[str, Residency],
        threads: int,
        provider: Provider | None = None,
        affinity: Sequence[int] = (),
    ) -> None:
        self._bundle = bundle
        self._provider = provider
        self.on_gpu = provider is not None
        self.residencies = residencies
        self.threads = threads
        self._affinity = affinity
        self._open: dict[str, Runner] = {}
        self._locks = {engine.file: threading.Lock() for engine in bundle.manifest.engines if engine.id in residencies}
        self._closed = False

    def get(self, engine: EngineEntry) -> Runner:
        """The open runner of ``engine``. Raises BundleError once the pool is closed, or if it cannot be opened."""
        runner = self._open.get(engine.file)
        if runner is not None:
            return runner
        with self._locks[engine.file]:
            if self._closed:
                raise BundleError(f"bundle {self._bundle.path}: the model is closed; use it inside its `with` block")
            if engine.file not in self._open:
                runner = self._runner(engine)
                self._open[engine.file] = runner.__enter__()
            return self._open[engine.file]

    def runnable(self) -> tuple[EngineEntry, ...]:
        """The bundle's engines that can run here. Raises BundleIncompatibleError if there is none."""
        return runnable_engines(self._bundle, self._provider)

    def device_source(self, engine: EngineEntry) -> Callable[[], Device] | None:
        """Opens the device on which ``engine``'s runner is a DeviceRunner, or None where it runs on the processor."""
        return device_source(engine, self._provider)

    def close(self) -> None:
        """Closes every engine; runs that are under way finish first or fail with BundleError."""
        self._closed = True
        for file, lock in self._locks.items():
            with lock:
                runner = self._open.pop(file, None)
                if runner is not None:
                    runner.__exit__(None, None, None)

    def _runner(self, engine: EngineEntry) -> Runner:
        residency = self.residencies[engine.id]
        return runner_for(self._bundle, engine, residency, self.threads, self._provider, self._affinity)
