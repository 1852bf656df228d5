"""Progress and timing of the stages of a long job."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ...progress import Bytes, Progress, heard_by

T = TypeVar("T")
# Between two reports of how far a long part is.
_SECONDS_BETWEEN = 0.5


class Clock:
    """Names the stage at work, reports progress within it, that of its long parts too (``progress.tell``), and keeps
    what each stage took: ``seconds`` on the wall, and ``cpu_seconds`` of all threads of this process."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._stage, self._at, self._told = "", (0, 0), 0.0
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._stage, self._at = stage, (0, 0)  # without parts, until it counts some
        with self.unreported(stage), heard_by(self._within):
            self.tick(0, 1)
            yield
        self.tick(1, 1)

    @contextmanager
    def unreported(self, stage: str) -> Iterator[None]:
        """As a call, for a stage so short that nobody waits for it: what it refuses stands alone."""
        began, cpu_began = time.perf_counter(), time.process_time()
        self._told = began
        yield
        self.seconds[stage] = round(time.perf_counter() - began, 3)
        self.cpu_seconds[stage] = round(time.process_time() - cpu_began, 3)

    def tick(self, done: float, total: int) -> None:
        """Reports ``done`` of ``total`` parts of the present stage."""
        self.progress(self._stage, done, total)

    def reach(self, done: int, total: int) -> None:
        """Reports ``done`` of ``total`` parts; what is told from now on is of the next one."""
        self._at = done, total
        self.tick(done, total)

    def each(self, items: Sequence[T]) -> Iterator[T]:
        """Yields ``items``, reporting progress before each."""
        for index, item in enumerate(items):
            self.reach(index, len(items))
            yield item

    def _within(self, done: int, total: int) -> None:
        """Reports the part at work, which is whole once the next one begins."""
        (index, parts), now = self._at, time.perf_counter()
        if done < total and now - self._told >= _SECONDS_BETWEEN:
            self._told = now
            bytes_alone = parts == 0 and isinstance(total, Bytes)
            self.progress(self._stage, *((done, total) if bytes_alone else (index + done / total, parts or 1)))
