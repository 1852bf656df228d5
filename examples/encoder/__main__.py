"""``make demo``: compile the real all-MiniLM-L6-v2 for this machine, run it, show what came out."""

from __future__ import annotations

import sys
from pathlib import Path

from ..commands import compile_once, demonstrate, nestforge
from .corpus import link_checkpoint, write_corpus

FOLDER = Path("demo")
MODEL = FOLDER / "minilm"
BUNDLE = FOLDER / "minilm.bundle"
CORPUS = FOLDER / "corpus.txt"
SENTENCE = "A submodel is a view of the universal model, not a copy."


def steps() -> None:
    FOLDER.mkdir(exist_ok=True)
    model = link_checkpoint(MODEL)
    print(f"{CORPUS}: {write_corpus(CORPUS)} lines of calibration text from Python's own docstrings")
    if not compile_once(model, BUNDLE, "--profile", "host-cpu", "--text", str(CORPUS)):
        nestforge("inspect", str(BUNDLE))
    nestforge("run", str(BUNDLE), "--text", SENTENCE)
    nestforge("run", str(BUNDLE), "--text", SENTENCE, "--budget", "tiny")
    print(f"\nThe model: {MODEL}, its calibration text: {CORPUS}, the bundle: {BUNDLE}")


if __name__ == "__main__":
    sys.exit(demonstrate(steps))
