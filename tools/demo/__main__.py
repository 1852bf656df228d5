"""``make demo``: compile the real all-MiniLM-L6-v2 for this machine, run it, show what came out.

Every step is a ``nestforge`` command that is printed before it runs, so that it can be repeated by hand.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from ...errors import NestforgeError
from .checkpoint import demo_checkpoint
from .corpus import write_corpus

FOLDER = Path("demo")
BUNDLE = FOLDER / "minilm.bundle"
CORPUS = FOLDER / "corpus.txt"
SENTENCE = "A submodel is a view of the universal model, not a copy."


def main() -> int:
    try:
        checkpoint = demo_checkpoint()
        FOLDER.mkdir(exist_ok=True)
        if BUNDLE.exists():
            print(f"{BUNDLE} exists and is used again; remove it (rm -r {BUNDLE}) to compile anew")
            _nestforge("inspect", str(BUNDLE))
        else:
            print(f"{CORPUS}: {write_corpus(CORPUS)} lines of calibration text from Python's own docstrings")
            _nestforge(
                "compile", _short(checkpoint), "--profile", "host-cpu", "--text", str(CORPUS), "--output", str(BUNDLE)
            )
        _nestforge("run", str(BUNDLE), "--text", SENTENCE)
        _nestforge("run", str(BUNDLE), "--text", SENTENCE, "--budget", "tiny")
    except NestforgeError as failure:
        print(f"demo: error: {failure}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as failure:
        return failure.returncode
    print(f"\nThe bundle lies in {BUNDLE.resolve()}")
    return 0


def _nestforge(*arguments: str) -> None:
    print(f"\n$ nestforge {shlex.join(arguments)}", flush=True)
    subprocess.run([Path(sys.executable).with_name("nestforge"), *arguments], check=True)


def _short(path: Path) -> str:
    """``path`` from here where it lies below, so that the printed command is readable."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
