"""Ctrl-C: the first one stops the command as Python does, which clears up on its way out; the next one ends it at once.

Python's exception may meet code that swallows it or makes another one of it, as an import of compiled code may; so it
is remembered that it was raised. Whatever a second Ctrl-C cuts off, the next run of the command removes.
"""

import os
import signal
import sys
from types import FrameType

LINE = "nestforge: interrupted"
EXIT_CODE = 130
_seen = False


def listen() -> None:
    """Installs the handler, for the rest of this process, unless whoever started it wants it to ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)


def ignore() -> None:
    """Ctrl-C has nothing to stop any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def was_interrupted() -> bool:
    """Whether Ctrl-C was pressed."""
    return _seen


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    global _seen
    if _seen:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{LINE}\n".encode())
        os._exit(EXIT_CODE)
    _seen = True
    raise KeyboardInterrupt
