"""The kill driver: one seed stops one job at one system call of it that changes, syncs or locks files.

The process is killed there, or interrupted as by Ctrl-C, or finds the disk full or read-only from there on. Then what
the job makes is as it was or complete, a disk's refusal is one line, and the same command ends the job with the bytes
of an undisturbed run and leaves no other file. Needs gcc, which makes the library that sees the calls (calls.c).

A seed is ``(call * actions + action) * jobs + job``, so that the seeds from 0 on stop every job at every call of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import worker
from ..outcomes import Result
from ..worker import begin
from .forks import KILLED, Ended, in_child
from .jobs import JOBS, Job

ACTIONS = ("kill", "interrupt", "full", "read-only")
_LIBRARY = "calls.so"
_INTERRUPTED = 130
_SECONDS = 600.0  # of a whole compile on a busy machine


def seed_of(job: str, action: str, call: int) -> int:
    """The seed that does ``action`` at ``call`` of ``job``, from 0."""
    jobs = [each.name for each in JOBS]
    return (call * len(ACTIONS) + ACTIONS.index(action)) * len(jobs) + jobs.index(job)


def build_library(folder: Path) -> Path:
    """The library of calls.c, compiled into ``folder``."""
    library, source = folder / _LIBRARY, Path(__file__).with_name("calls.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def open_driver(folder: Path) -> Callable[[int], Result]:
    """See the package. Starts this process again under the library, where that is not done yet."""
    library = folder / _LIBRARY
    if os.environ.get("LD_PRELOAD") != str(library):
        build_library(folder)
        os.dup2(worker._channel.fileno(), 1)
        os.environ["LD_PRELOAD"] = str(library)
        os.execv(sys.executable, [sys.executable, "-m", "hostile.worker", "kill", str(folder)])  # noqa: S606
    calls = ctypes.CDLL(str(library))
    known: dict[str, Subject] = {}

    def attempt(seed: int) -> Result:
        rest, number = divmod(seed, len(JOBS))
        job = JOBS[number]
        call, action = divmod(rest, len(ACTIONS))
        if job.name not in known:
            known[job.name] = Subject.of(job, folder / job.name, calls)
        return known[job.name].attempt(seed, ACTIONS[action], call)

    return attempt


@dataclass(frozen=True)
class Subject:
    """A job with what an undisturbed run of it makes: ``before`` and ``after`` are contents by name, ``files`` names.

    ``calls`` counts the system calls of that run. The job runs in ``folder``, which begins as a copy of ``template``.
    """

    job: Job
    template: Path
    folder: Path
    library: ctypes.CDLL
    before: Mapping[str, object]
    after: Mapping[str, object]
    files: frozenset[str]
    calls: int

    @classmethod
    def of(cls, job: Job, place: Path, library: ctypes.CDLL) -> Subject:
        template, folder = place / "template", place / "run"
        template.mkdir(parents=True)
        begin(job.name, "preparing", _SECONDS)
        job.imports()
        # In the folder where the job runs: what it prepares may name its place.
        template.rename(folder)
        ended = in_child(lambda: job.prepare(folder), folder, place / "prepare.log")
        assert ended.code == 0, ended.output
        shutil.copytree(folder, template, symlinks=True)
        before = job.content(folder)

        def count() -> None:
            library.calls_arm(str(folder).encode(), 0, ctypes.c_long(0))
            try:
                job.run(folder)
            finally:
                library.calls_seen.restype = ctypes.c_long
                (place / "calls").write_text(json.dumps(library.calls_seen()))

        begin(job.name, "not disturbed", _SECONDS)
        ended = in_child(count, folder, place / "count.log")
        assert ended.code == 0, ended.output
        calls = json.loads((place / "calls").read_text())
        return cls(job, template, folder, library, before, job.content(folder), names(folder), calls)

    def attempt(self, seed: int, action: str, call: int) -> Result:
        """Outcomes of the job that is stopped at ``call``, and of the same job after that."""
        how = f"{action} at call {call} of {self.calls}"
        if call >= self.calls:
            return Result(seed, "skipped", self.job.name, how)
        begin(self.job.name, how, _SECONDS)
        shutil.rmtree(self.folder)
        shutil.copytree(self.template, self.folder, symlinks=True)

        def stopped() -> None:
            number = 1 + ACTIONS.index(action)
            self.library.calls_arm(str(self.folder).encode(), number, ctypes.c_long(call))
            self.job.run(self.folder)

        log = self.folder.with_name("run.log")
        first = in_child(stopped, self.folder, log)
        found = self.job.content(self.folder)
        problem = self._problem(action, first, found)
        if problem is None:
            begin(self.job.name, f"{how}, and again", _SECONDS)
            again = in_child(lambda: self.job.run(self.folder), self.folder, log)
            problem = self._problem_after(again, self.job.content(self.folder), is_done=found == self.after)
        if problem is not None:
            return Result(seed, problem[0], self.job.name, how, problem[1])
        return Result(seed, "refused" if first.code == 1 else "same", self.job.name, how)

    def _problem(self, action: str, ended: Ended, found: Mapping[str, object]) -> tuple[str, str] | None:
        if found not in (self.before, self.after):
            return "wrong", f"neither as it was nor complete: {sorted(set(found) ^ set(self.after))}"
        if "Traceback" in ended.output:
            return "escaped", ended.output[-1500:]
        expected = {"kill": KILLED, "interrupt": _INTERRUPTED, "full": 1, "read-only": 1}[action]
        if ended.code not in (expected, 0):
            return "escaped", f"exit code {ended.code}, expected {expected}: {ended.output[-500:]}"
        if ended.code == 0 and found != self.after:
            return "wrong", f"exit code 0, and not done: {ended.output[-500:]}"
        if ended.code in (1, _INTERRUPTED):
            lines = [line for line in ended.output.splitlines() if line.startswith("nestforge: ")]
            if len(lines) != 1 or ended.output.splitlines()[-1] != lines[0]:
                return "unprintable", ended.output[-500:]
        return None

    def _problem_after(self, ended: Ended, found: Mapping[str, object], is_done: bool) -> tuple[str, str] | None:
        is_refused_as_done = is_done and ended.code == 1 and "exists already" in ended.output
        if ended.code != 0 and not is_refused_as_done:
            return "wrong", f"the same command after it: exit code {ended.code}: {ended.output[-1500:]}"
        if found != self.after:
            return "wrong", "the same command after it made something else"
        stray = names(self.folder) - self.files
        return ("leaked", f"files that stay: {sorted(stray)}") if stray else None


def names(folder: Path) -> frozenset[str]:
    """Every file and folder below ``folder``."""
    return frozenset(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
