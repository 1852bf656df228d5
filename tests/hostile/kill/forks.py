"""A job in a child of a process that has imported everything: no import is paid for twice."""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nestforge.errors import NestforgeError
from nestforge.tools import interruption

KILLED = -signal.SIGKILL
_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Ended:
    """How a job ended: its exit code, or minus the signal that killed it, and what it printed."""

    code: int
    output: str


def in_child(job: Callable[[], None], folder: Path, log: Path) -> Ended:
    """Runs ``job`` in a child process, in ``folder``, as the command line would."""
    child = os.fork()
    if not child:
        code = 1
        ctypes.CDLL(None).prctl(_WITH_PARENT, signal.SIGKILL)  # whatever ends the worker ends the job
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.chdir(folder)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            interruption.listen()
            code = _code_of(job)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return Ended(os.waitstatus_to_exitcode(status), log.read_text(errors="replace"))


def _code_of(job: Callable[[], None]) -> int:
    try:
        job()
    except SystemExit as end:
        return int(end.code or 0)
    except NestforgeError as failure:
        print(f"nestforge: error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nestforge: interrupted", file=sys.stderr)
        return 130
    except BaseException:  # noqa: BLE001  (whatever it is, the driver shows it)
        traceback.print_exc()
        return 1
    return 0


def command(*arguments: object) -> None:
    """One command of the command line; raises SystemExit."""
    from nestforge.tools.cli import main

    sys.argv = ["nestforge", *map(str, arguments)]
    main()
