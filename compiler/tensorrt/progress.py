"""TensorRT's reports while it builds, as progress; and the way to stop a build that takes too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...progress import Progress


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
