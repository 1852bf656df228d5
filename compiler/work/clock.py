"""Progress and timing of the stages of a long job."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ...progress import Progress

T = TypeVar("T")


class Clock:
    """Names the stage at work, reports progress within it, and keeps what each stage took: ``seconds`` on the wall, and
    ``cpu_seconds`` of all threads of this process."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._stage = ""
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._stage = stage
        with self.unreported(stage):
            self.tick(0, 1)
            yield
        self.tick(1, 1)

    @contextmanager
    def unreported(self, stage: str) -> Iterator[None]:
        """As a call, for a stage so short that nobody waits for it: what it refuses stands alone."""
        began, cpu_began = time.perf_counter(), time.process_time()
        yield
        self.seconds[stage] = round(time.perf_counter() - began, 3)
        self.cpu_seconds[stage] = round(time.process_time() - cpu_began, 3)

    def tick(self, done: int, total: int) -> None:
        """Reports ``done`` of ``total`` parts of the present stage."""
        self.progress(self._stage, done, total)

    def each(self, items: Sequence[T]) -> Iterator[T]:
        """Yields ``items``, reporting progress before each."""
        for index, item in enumerate(items):
            self.tick(index, len(items))
            yield item
