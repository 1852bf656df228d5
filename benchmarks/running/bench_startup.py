"""A new process: import the runtime, open a bundle, answer once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

from ..harness import Row, milliseconds
from ..subjects import bert_base_bundle, minilm_bundle

_ANSWER = """
import sys, numpy, nestforge.runtime, nestforge
with nestforge.load(sys.argv[1], residency=sys.argv[2]) as model:
    feeds = {spec.name: numpy.ones((1, 16), spec.dtype) for spec in model.bundle.manifest.inputs}
    model(feeds)
"""


def run() -> list[Row]:
    return [
        _row("MiniLM", minilm_bundle(), "auto"),
        _row("MiniLM", minilm_bundle(), "shared"),
        _row("BERT-base shape", bert_base_bundle(), "shared"),
    ]


def _row(name: str, bundle: Path, residency: str) -> Row:
    command = [sys.executable, "-c", _ANSWER, str(bundle), residency]
    times = [milliseconds(lambda: subprocess.run(command, check=True)) for _ in range(6)][1:]
    return Row(
        f"start, open, first answer: {name}, {residency}",
        f"{median(times) / 1e3:.2f} s",
        "< 1 s",
        median(times) < 1000,
        "whole process, median of 5 after one to warm the disk",
    )
