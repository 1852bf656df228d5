"""The one thread that runs sessions on a GPU.

ONNX Runtime keeps CUDA graphs and the handles of cuBLAS and cuDNN, with their workspaces, for every thread that ever
ran a session; where it captures, it gives none of them back before the session closes. So that a server whose requests
come on many threads warms up once, all of them hand their runs to this one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class DeviceThread:
    """Does what it is handed, in order, while whoever hands it over waits."""

    def __init__(self, begin: Callable[[], None]) -> None:
        """``begin`` is the first thing that the thread does, here and after ``renew``; what it raises is raised."""
        self._begin = begin
        self._start()

    def perform(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises. It performs nothing itself, and takes no lock that the caller holds."""
        done = self._executor.submit(work)
        try:
            return done.result()
        finally:
            while not done.done():  # the caller was interrupted, but the work still reads what is the caller's
                with suppress(KeyboardInterrupt):
                    wait((done,))
            del done  # a failure holds this frame, and the frame would hold the failure

    def renew(self) -> None:
        """Goes on in a new thread, which has none of the errors that CUDA keeps for each."""
        self.close()
        self._start()

    def close(self) -> None:
        """Ends the thread."""
        self._executor.shutdown()

    def _start(self) -> None:
        self._executor = ThreadPoolExecutor(1, "nestforge-device")
        try:
            self._executor.submit(self._begin).result()
        except BaseException:
            self.close()
            raise
