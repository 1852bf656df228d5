"""Memory of a process once every task of a bundle has answered: ``python -m ... BUNDLE``, bytes on stdout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..bucket import Bucket
from ..runtime.inputs.arrays import random_feeds
from ..runtime.load import load


def resident_bytes(bundle: Path) -> int:
    """In a process of its own, with a packed engine: the base answers, and then every task. Counted are anonymous pages
    and this process's part of mapped ones, beyond what was there before the bundle was opened."""
    command = [sys.executable, "-m", __name__, str(bundle)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _pss() -> int:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if ":" in line)
    return int(rows["Pss"].split()[0]) * 1024


def _measured(bundle: str) -> int:
    before = _pss()
    with load(bundle, residency="packed", threads=1) as model:
        bucket = model.bundle.manifest.engines[0].bucket
        feeds = random_feeds(model.bundle.manifest.inputs, Bucket(bucket.batch, bucket.sequence))
        for task in 2 * (None, *model.tasks.entries):  # a second run may take memory that the first did not
            model(feeds, task=task)
        return _pss() - before


if __name__ == "__main__":
    print(_measured(sys.argv[1]))
