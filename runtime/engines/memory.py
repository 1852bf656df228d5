"""A cap on what the open engines of a model hold together with the caches of its sessions."""

from __future__ import annotations

import threading
from collections.abc import Collection

from ...bundle.entries.engine_entry import EngineEntry
from ...bundle.open_bundle import Bundle
from ...errors import SelectionError
from ...ownership import Owned, Owner
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
        self._open = Owned[tuple[str, Residency]]()
        self._others = Owned[int]()
        self.of_model = Owner()  # of what stays as long as the model
        self._lock = threading.Lock()

    @property
    def left_mb(self) -> float:
        """What is left under the cap."""
        with self._lock:
            return self._left_mb(self._open.present())

    def left_mb_without(self, engines: Collection[tuple[EngineEntry, Residency]]) -> float:
        """What would be left if these, which are open so, were not."""
        with self._lock:
            others = self._open.present()
            for engine, residency in engines:
                others.remove((engine.id, residency))
            return self._left_mb(others)

    def open(self, owner: Owner, engine: EngineEntry, residency: Residency) -> None:
        """Counts ``engine`` until ``owner`` is over. Raises SelectionError where it exceeds the cap beside what is
        open."""
        with self._lock:
            left_mb = self._left_mb([*self._open.present(), (engine.id, residency)])
            if left_mb < 0:
                raise SelectionError(
                    f"memory_mb={self.memory_mb:g}: engine {engine.id} as {residency} takes {-left_mb:.1f} MB more "
                    "than is left beside the engines and sessions that are open; close a session, or raise the cap"
                )
            self._open.add(owner, (engine.id, residency))

    def take(self, owner: Owner, count: int, what: str, mend: str) -> None:
        """Counts ``count`` bytes beside the engines until ``owner`` is over. Raises SelectionError if they exceed the
        cap, by a line that says ``what`` takes them, and what to do but to raise the cap."""
        with self._lock:
            left_mb = self._left_mb(self._open.present())
            if count > 1e6 * left_mb:
                raise SelectionError(
                    f"memory_mb={self.memory_mb:g}: {what} of {count / 1e6:.1f} MB, {max(0.0, left_mb):.1f} MB "
                    f"are left; {mend}, or raise the cap"
                )
            self._others.add(owner, count)

    def taken_by(self, owner: Owner) -> int:
        """The bytes that ``owner`` has taken."""
        with self._lock:
            return sum(self._others.of(owner))

    def _left_mb(self, engines: Collection[tuple[str, Residency]]) -> float:
        """Beside ``engines`` and all that is no engine."""
        self._engines.clear()
        for engine, residency in engines:
            self._engines.add(self._needs[engine], residency)
        return self.memory_mb - (self._engines.bytes + sum(self._others.present())) / 1e6
