"""Programs whose look-ups of hosts and written files are seen, those of compiled libraries too. Needs gcc."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# What a process that imports nestforge or PyTorch sets for itself, and its children inherit.
_OURS = ("ORT_", "HF_", "XDG_", "TORCHINDUCTOR_")


@dataclass(frozen=True)
class Watched:
    """What a program did: ``hosts`` looked up or connected to, ``files`` opened to write and folders made; what it
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
