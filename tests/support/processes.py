"""Programs and blocks of tests in other conditions: watched, killed, as a user without rights, on a device that cannot
compile."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

# Variables that a process which imports nestforge or PyTorch sets for itself, and its children inherit.
_OURS = ("ORT_", "HF_", "XDG_", "TORCHINDUCTOR_")


@dataclass(frozen=True)
class Watched:
    """Record of a program: ``hosts`` looked up or connected to, ``files`` opened to write and folders made; what it
    ``said`` on stderr."""

    hosts: tuple[str, ...]
    files: tuple[Path, ...]
    said: str


def watched(program: str, home: Path, *arguments: str, **environment: str) -> Watched:
    """Runs the Python ``program`` as a user whose home is ``home``, and whose temporary files lie in ``home``/tmp."""
    library, log = home / "watch.so", home / "watched"
    (home / "tmp").mkdir(parents=True)
    source = Path(__file__).with_name("watch.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", library, source, "-ldl"], check=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    own = {"HOME": home, "TMPDIR": home / "tmp", "LD_PRELOAD": library, "WATCHED": log, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**kept, **{key: str(value) for key, value in own.items()}, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    noted = [line.partition(" ")[::2] for line in log.read_text().splitlines()] if log.exists() else []
    hosts, files = ([name for kind, name in noted if kind == wanted] for wanted in ("host", "file"))
    return Watched(tuple(hosts), tuple(Path(file) for file in files if file != os.devnull), done.stderr)


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


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")


@contextmanager
def nobody(*readable: Path) -> Iterator[None]:
    """As a user without rights, who may read ``readable`` and what is in it."""
    modes = {each: each.stat().st_mode for path in readable for each in (path, *path.parents, *path.glob("*"))}
    for each, mode in modes.items():
        each.chmod(mode | (0o055 if each.is_dir() else 0o044))
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        for each, mode in modes.items():
            each.chmod(mode)


# Packages that only a compiling machine has; importing any of them fails here.
DEVICE_PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {"torch", "transformers", "onnx", "onnx_ir", "nestforge.compiler", "nestforge.exporters"}:
            raise ImportError(name + " is not on this device")

sys.meta_path.insert(0, Absent())
from nestforge.tools.cli import main
main()
"""
