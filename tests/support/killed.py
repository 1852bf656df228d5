"""A job in a child process that is killed on the way, as by `kill -9`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def killed(job: Callable[[], object]) -> None:
    """Runs ``job`` in a child process, where it must come to ``die``."""
    child = os.fork()
    if not child:
        try:
            job()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def die(*_: object) -> None:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)
