"""The open engines of one model: each is opened once, by the first request that needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.open_bundle import Bundle
from ...errors import BundleError
from ...ownership import Owner
from ..device.device import Device
from ..graphs.task_tensors import TaskTensors
from .memory import MemoryCap
from .onnxruntime_gpu.provider import Provider
from .residency import Residency
from .runner import Runner, TakesTasks, device_source, runnable_engines, runner_for


class EnginePool:
    """Opens engines on demand and closes them all together; engines of one file are one. Thread-safe.

    With a ``provider`` their graphs run in ONNX Runtime on it, else each engine runs on its backend. Open engines count
    under the ``memory`` cap, if there is one.
    """

    def __init__(
        self,
        bundle: Bundle,
        residencies: Mapping[str, Residency],
        threads: int,
        provider: Provider | None = None,
        affinity: Sequence[int] = (),
        memory: MemoryCap | None = None,
    ) -> None:
        self.bundle = bundle
        self._memory = memory
        self._provider = provider
        self.on_gpu = provider is not None
        self.residencies = residencies
        self.threads = threads
        self._affinity = affinity
        self._open: dict[str, Runner] = {}
        # By file; the owner has what is counted under the cap.
        self._opened_as: dict[str, tuple[EngineEntry, Residency, Owner]] = {}
        self._ran: set[str] = set()
        self._locks = {engine.file: threading.Lock() for engine in bundle.manifest.every_engine}
        self._closed = False

    def get(self, engine: EngineEntry) -> Runner:
        """The open runner of ``engine``. Raises BundleError once the pool is closed, or if it cannot be opened,
        SelectionError if that exceeds the memory cap."""
        runner = self._open.get(engine.file)
        if runner is not None:
            return runner
        with self._locks[engine.file]:
            if self._closed:
                raise BundleError(f"bundle {self.bundle.path}: the model is closed; use it inside its `with` block")
            if engine.file not in self._open:
                self._open[engine.file] = self._opened(engine)
            return self._open[engine.file]

    def of_task(self, engine: EngineEntry, task: TaskTensors | None) -> Runner:
        """The open runner of ``engine`` with the tensors of ``task`` in place of the base's, None for those. Raises as
        ``get``."""
        runner = self.get(engine)
        if task is None or self.bundle.merged is not None:  # a merged one's are in the weights
            return runner
        assert isinstance(runner, TakesTasks)  # a manifest states tasks of no other backend
        return runner.for_task(task)

    def is_open(self, engine: EngineEntry) -> bool:
        """Whether a request has opened ``engine``."""
        return engine.file in self._open

    def runs_first(self, engine: EngineEntry) -> bool:
        """Whether ``engine``, which has run now, had not before since it was opened."""
        if engine.file in self._ran:
            return False
        self._ran.add(engine.file)
        return True

    @property
    def held(self) -> list[tuple[EngineEntry, Residency]]:
        """The open engines, and how each holds its weights."""
        return [(engine, residency) for engine, residency, _ in self._opened_as.values()]

    def reassign(self, residencies: Mapping[str, Residency]) -> None:
        """Holds engines as ``residencies`` say from now on, where no run is under way. One that is open is closed where
        it must give memory back, and stays as it is otherwise."""
        decided = dict(residencies)
        for engine, residency in self.held:
            if engine.id in decided and residency == "shared":
                decided[engine.id] = residency
            elif decided.get(engine.id) != residency:
                with self._locks[engine.file]:
                    self._close(engine.file)
        self.residencies = decided

    def runnable(self) -> tuple[EngineEntry, ...]:
        """The bundle's engines that can run here. Raises BundleIncompatibleError if there is none."""
        return runnable_engines(self.bundle, self._provider)

    def device_source(self, engine: EngineEntry) -> Callable[[], Device] | None:
        """Opens the device on which ``engine``'s runner is a DeviceRunner, or None where it runs on the processor."""
        return device_source(engine, self._provider)

    def close(self) -> None:
        """Closes every engine; runs that are under way finish first or fail with BundleError."""
        self._closed = True
        for file, lock in self._locks.items():
            with lock:
                self._close(file)

    def _close(self, file: str) -> None:
        runner = self._open.pop(file, None)
        self._ran.discard(file)
        if runner is not None:
            runner.__exit__(None, None, None)
        self._opened_as.pop(file, None)

    def _opened(self, engine: EngineEntry) -> Runner:
        residency, owner = self.residencies[engine.id], Owner()
        runner = runner_for(self.bundle, engine, residency, self.threads, self._provider, self._affinity)
        try:
            if self._memory is not None:
                self._memory.open(owner, engine, residency)
            opened = runner.__enter__()
        except BaseException:
            owner.is_over = True
            raise
        self._opened_as[engine.file] = engine, residency, owner
        return opened
