"""The open engines of one model: each is opened once, by the first request that needs it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ..errors import BundleError
from .bundle import Bundle
from .manifest import EngineEntry
from .residency import Residency
from .runner import Runner, runner_for


class EnginePool:
    """Opens engines on demand and closes them all together; engines of one file are one. Thread-safe."""

    def __init__(self, bundle: Bundle, residencies: Mapping[str, Residency], threads: int) -> None:
        self._bundle = bundle
        self.residencies = residencies
        self._threads = threads
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
                runner = runner_for(self._bundle, engine, self.residencies[engine.id], self._threads)
                self._open[engine.file] = runner.__enter__()
            return self._open[engine.file]

    def close(self) -> None:
        """Closes every engine; runs that are under way finish first or fail with BundleError."""
        self._closed = True
        for file, lock in self._locks.items():
            with lock:
                runner = self._open.pop(file, None)
                if runner is not None:
                    runner.__exit__(None, None, None)
