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
    """Opens engines on demand and closes them all together. Thread-safe."""

    def __init__(self, bundle: Bundle, residencies: Mapping[str, Residency], threads: int) -> None:
        self._bundle = bundle
        self._residencies = residencies
        self._threads = threads
        self._open: dict[str, Runner] = {}
        self._locks = {engine: threading.Lock() for engine in residencies}
        self._closed = False

    def get(self, engine: EngineEntry) -> Runner:
        """The open runner of ``engine``. Raises BundleError once the pool is closed, or if it cannot be opened."""
        runner = self._open.get(engine.id)
        if runner is not None:
            return runner
        with self._locks[engine.id]:
            if self._closed:
                raise BundleError(f"bundle {self._bundle.path}: the model is closed; use it inside its `with` block")
            if engine.id not in self._open:
                runner = runner_for(self._bundle, engine, self._residencies[engine.id], self._threads)
                self._open[engine.id] = runner.__enter__()
            return self._open[engine.id]

    def close(self) -> None:
        """Closes every engine; runs that are under way finish first or fail with BundleError."""
        self._closed = True
        for engine, lock in self._locks.items():
            with lock:
                runner = self._open.pop(engine, None)
                if runner is not None:
                    runner.__exit__(None, None, None)
