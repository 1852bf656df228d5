"""A cap on what the open engines of a model hold together with the caches of its sessions."""

from __future__ import annotations

import threading
from collections.abc import Collection

from ...errors import SelectionError
from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.open_bundle import Bundle
from .contract.residency import OpenEngines, Residency
from .needs import engine_needs


class MemoryCap:
    """Counts, by the figures of the manifest, what is open; what would exceed the cap is refused. Thread-safe.

    Engines for whole inputs have residencies that keep the cap when all of them are open; so none of them is refused
    until engines that generate, or caches, are open beside them.
    """

    def __init__(self, bundle: Bundle, memory_mb: float) -> None:
        self.memory_mb = memory_mb
        needs = engine_needs(bundle, bundle.manifest.every_engine)
        self._needs = {need.engine: need for need in needs}
        self._engines = OpenEngines(needs)
        self._other_bytes = 0
        # A session that is collected while a count is under way gives its bytes back in the same thread.
        self._lock = threading.RLock()

    @property
    def left_mb(self) -> float:
        """What is left under the cap."""
        return self.memory_mb - (self._engines.bytes + self._other_bytes) / 1e6

    def left_mb_without(self, engines: Collection[tuple[EngineEntry, Residency]]) -> float:
        """What would be left if these, which are open so, were not."""
        with self._lock:
            for engine, residency in engines:
                self._engines.remove(self._needs[engine.id], residency)
            left = self.left_mb
            for engine, residency in engines:
                self._engines.add(self._needs[engine.id], residency)
            return left

    def open(self, engine: EngineEntry, residency: Residency) -> None:
        """Counts ``engine``. Raises SelectionError if it exceeds the cap beside what is open."""
        need = self._needs[engine.id]
        with self._lock:
            self._engines.add(need, residency)
            if self.left_mb < 0:
                over = -self.left_mb
                self._engines.remove(need, residency)
                raise SelectionError(
                    f"memory_mb={self.memory_mb:g}: engine {engine.id} as {residency} takes {over:.1f} MB more than is "
                    "left beside the engines and sessions that are open; close a session, or raise the cap"
                )

    def close(self, engine: EngineEntry, residency: Residency) -> None:
        """Counts an engine no more."""
        with self._lock:
            self._engines.remove(self._needs[engine.id], residency)

    def take(self, count: int, what: str, mend: str) -> None:
        """Counts ``count`` bytes beside the engines. Raises SelectionError if they exceed the cap, by a line that says
        ``what`` takes them, and what to do but to raise the cap."""
        with self._lock:
            if count > 1e6 * self.left_mb:
                raise SelectionError(
                    f"memory_mb={self.memory_mb:g}: {what} of {count / 1e6:.1f} MB, {max(0.0, self.left_mb):.1f} MB "
                    f"are left; {mend}, or raise the cap"
                )
            self._other_bytes += count

    def give(self, count: int) -> None:
        """Counts them no more."""
        with self._lock:
            self._other_bytes -= count
