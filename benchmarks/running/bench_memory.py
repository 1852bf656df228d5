"""Memory of eight engines at once, against the largest alone as most people load it."""

from __future__ import annotations

import json
import subprocess
import sys

from ...bundle.open_bundle import open_bundle
from ...runtime.engines.measure import memory_use
from ..harness import Row
from ..subjects import CORES, bert_base, bert_base_bundle

_ALONE = """
import json, sys
from pathlib import Path
from nestforge.runtime.engines.measure import _memory_of_this_process
from nestforge.benchmarks.subjects import default_session
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.inputs.feeds import random_feeds
from nestforge.benchmarks.subjects import BUCKET
feeds = random_feeds(open_bundle(sys.argv[2]).manifest.inputs, BUCKET)
before = _memory_of_this_process()
session = default_session(Path(sys.argv[1]))
session.run(None, feeds)
after = _memory_of_this_process()
print(json.dumps([a - b for a, b in zip(after, before)]))
"""


def run() -> list[Row]:
    bundle = open_bundle(bert_base_bundle())
    largest = bundle.manifest.submodels[-1].id
    eight = [engine.id for engine in bundle.manifest.engines[-1::-8]][:8]
    together = memory_use(bundle.path, eight, "shared", CORES)
    command = [sys.executable, "-c", _ALONE, str(bert_base().plain(largest)), str(bundle.path)]
    private, resident = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return [
        Row(
            "eight engines resident, BERT-base shape",
            f"{together.resident / resident:.2f}x ({together.resident / 1e6:.0f} MB resident, "
            f"{together.private / 1e6:.0f} of them private, against {resident / 1e6:.0f} and {private / 1e6:.0f} MB)",
            "<= 1.3x",
            together.resident <= 1.3 * resident,
            f"{len(eight)} shared engines, run once, against the largest as a default session of a plain export; "
            "growth of resident memory (a page mapped several times counts once), a process each",
        )
    ]
