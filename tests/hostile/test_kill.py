"""Jobs that are stopped at their system calls, a few hundred in all, and that the driver sees what it is there for."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from hostile.drive import drive
from hostile.kill import ACTIONS, build_library, seed_of
from hostile.outcomes import described

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc makes the library that sees system calls")


def test_publishing_resumes_or_is_done_wherever_it_is_killed() -> None:
    """At every system call from the first folder to the last that is removed."""
    report = drive("kill", (seed_of("stage", "kill", call) for call in range(40)))
    assert not report.findings, described(report.findings, "kill")
    assert report.counts["stage"]["same"] > 25
    assert report.counts["stage"]["skipped"] > 0, "more calls than were tried"


def test_whatever_writes_what_is_kept_ends_well_when_it_is_stopped() -> None:
    random = Random(0)
    calls = {"stage": 30, "calibrate": 9, "measure": 9, "index": 14, "run": 12, "mapped": 70, "profile": 17, "key": 11}
    seeds = [seed_of(job, action, random.randrange(calls[job])) for job in calls for action in ACTIONS]
    report = drive("kill", seeds)
    assert not report.findings, described(report.findings, "kill")
    assert report.total == len(seeds)


def interrupted_at(library: Path, opening: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``nestforge ARGUMENTS`` in a new process, with Ctrl-C at the n-th file that it opens once it has begun."""
    environment = {**os.environ, "LD_PRELOAD": str(library), "CALLS_INTERRUPT_AT_OPENING": str(opening)}
    return subprocess.run(
        [sys.executable, "-m", "nestforge", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize("opening", [0, 1, 5, 40, 120])
def test_an_interruption_during_imports_is_one_line(tmp_path: Path, opening: int) -> None:
    library = build_library(tmp_path)
    done = interrupted_at(library, opening, "plan", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "nestforge: interrupted\n")
