"""Progress and timing of the stages of a long job, and of TensorRT's phases within a build, which may be stopped."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
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


class Phases:
    """The build's outermost phases as ``progress(stage, done, total)``; inner ones only keep it alive. Thread-safe.

    ``deadline`` is a time of ``clock`` at which the build is to stop.
    """

    def __init__(self, progress: Progress, deadline: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._deadline, self._clock = progress, deadline, clock
        self._steps: dict[str, int] = {}
        self._lock = threading.Lock()
        self.timed_out = False

    def started(self, phase: str, parent: str | None, steps: int) -> None:
        """A phase of ``steps`` steps began, inside of ``parent`` if it is given."""
        if not parent:
            with self._lock:
                self._steps[phase] = steps
                self._progress(phase, 0, steps)

    def stepped(self, phase: str, step: int) -> bool:
        """Step number ``step`` of ``phase`` is done; false asks for the build to stop."""
        with self._lock:
            if phase in self._steps:
                self._progress(phase, step + 1, self._steps[phase])
            if self._deadline is not None and self._clock() > self._deadline:
                self.timed_out = True
            return not self.timed_out

    def finished(self, phase: str) -> None:
        """The phase is over, whether all of its steps were done or not."""
        with self._lock:
            steps = self._steps.pop(phase, None)
            if steps is not None:
                self._progress(phase, steps, steps)
