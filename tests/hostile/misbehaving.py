"""A driver whose inputs do the worst on purpose: it shows that the frame survives and names each."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from .outcomes import Result
from .worker import MEMORY_MB, begin

KINDS = ("same", "abort", "bus error", "exit", "hang", "memory", "raise", "same")


def open_driver(folder: Path) -> Callable[[int], Result]:
    def attempt(seed: int) -> Result:
        kind = KINDS[seed % len(KINDS)]
        begin("misbehaving", kind)
        print("libraries print what they like")
        if kind == "abort":
            os.abort()
        if kind == "bus error":
            os.kill(os.getpid(), signal.SIGBUS)
        if kind == "exit":
            os._exit(0)
        if kind == "hang":
            time.sleep(3600)
        if kind == "memory":
            bytearray(b"x" * ((MEMORY_MB + 256) * 2**20))
        if kind == "raise":
            raise ValueError("the driver's own defect")
        return Result(seed, "same", "misbehaving", kind)

    return attempt
