"""Runs the seeds of a driver in a worker process, one after the other, and survives what they do to it."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO, Any, Self

from .outcomes import Report, Result

# Time limit of one input, generous for a busy machine: most take some milliseconds.
HUNG_SECONDS = 60.0
# Drivers whose inputs are whole commands, such as a compile that is stopped and ended.
_LONGER = {"kill": 900.0}
# Until a driver has its subjects.
_READY_SECONDS = 600.0
# The worker is made anew after so many inputs, so that what libraries keep for ever cannot pass for a finding.
_RENEWED_AFTER = 2000
_TAIL = 2000


def drive(
    driver: str,
    seeds: Iterable[int],
    seconds: float | None = None,
    on_result: Callable[[Result], object] | None = None,
) -> Report:
    """Outcomes of ``seeds``, as many as begin within ``seconds``. ``driver`` is a module of this package."""
    report, started = Report(driver), monotonic()
    with Worker(driver) as worker:
        for seed in seeds:
            if seconds is not None and monotonic() - started > seconds:
                break
            result = worker.run(seed)
            report.add(result)
            if on_result is not None:
                on_result(result)
    report.seconds = monotonic() - started
    return report


class Worker:
    """A process that tries inputs; started when one is requested, and again after one that killed it."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._done = 0
        self._folder = tempfile.TemporaryDirectory(prefix="hostile-", ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._folder.cleanup()

    def run(self, seed: int) -> Result:
        """The outcome of one input; a crash and a hang are outcomes too."""
        if self._process is None or self._done >= _RENEWED_AFTER:
            self._stop()
            self._start()
        self._process.stdin.write(f"{seed}\n".encode())
        self._process.stdin.flush()
        self._done += 1
        begun: dict[str, Any] = {}
        usual = _LONGER.get(self._driver, HUNG_SECONDS)
        limit = monotonic() + usual
        while True:
            line = self._line(limit)
            if line is None:
                return self._lost(seed, "hung", begun)
            if not line:
                return self._lost(seed, "crashed", begun)
            data = json.loads(line)
            if "outcome" in data:
                return Result(**data)
            begun = data  # said before the input is used, so that a crash has a name
            limit = monotonic() + (data["seconds"] or usual)

    def _line(self, limit: float) -> bytes | None:
        """The next line of the worker: None when there is none in time, empty when it has died."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, limit - monotonic())):
                return None
        return self._process.stdout.readline()

    def _lost(self, seed: int, outcome: str, begun: dict[str, Any]) -> Result:
        if outcome == "hung":
            self._process.send_signal(signal.SIGABRT)  # faulthandler then says where
        status = self._wait()
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace")[-_TAIL:]
        how = begun.get("how", "before its damage was made")
        self._stop()
        return Result(seed, outcome, begun.get("what", self._driver), how, f"exit status {status}: {tail}")

    def _wait(self) -> int:
        try:
            return self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _start(self) -> None:
        tests = Path(__file__).parents[1]
        folder = tempfile.mkdtemp(dir=self._folder.name)
        # A cache and a temporary folder of its own: nothing that an input leaves reaches the next test or the user.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(tests), os.environ.get("PYTHONPATH")])),
            "XDG_CACHE_HOME": folder,
            "TMPDIR": folder,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "RAYON_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hostile.worker", self._driver, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            cwd=folder,
            bufsize=0,  # what is buffered here would not wake the selector
        )
        self._done = 0
        if not self._line(monotonic() + _READY_SECONDS):
            self._errors.seek(0)
            reason = self._errors.read().decode(errors="replace")[-_TAIL:]
            self._stop()
            raise RuntimeError(f"driver {self._driver}: its worker does not start: {reason}")

    def _stop(self) -> None:
        if self._process is not None:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # the process at its other end has died
                        stream.close()
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None
