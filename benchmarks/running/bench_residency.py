"""What an engine of any length, and each further submodel, adds to a process in each residency."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ...bucket import Bucket
from ...bundle.open_bundle import open_bundle
from ...runtime.engines.measure import memory_use
from ...runtime.engines.residency import RESIDENCIES
from ..harness import Row
from ..subjects import BUCKET, CORES, minilm_lengths_bundle

_LONGEST = 512
# Every length that an engine may meet, in the order of lengths: what it needs grows with each.
_SERVING = """
import json, sys
from nestforge.bucket import Bucket
from nestforge.bundle.open_bundle import open_bundle
from nestforge.runtime.engines.measure import _memory_of_this_process
from nestforge.runtime.engines.runner import runner_for
from nestforge.runtime.inputs.feeds import random_feeds
path, name, threads, *lengths = json.loads(sys.argv[1])
bundle = open_bundle(path)
(engine,) = (engine for engine in bundle.manifest.engines if engine.id == name)
runner = runner_for(bundle, engine, "packed", threads)
before = _memory_of_this_process()
with runner:
    for length in lengths:
        runner.run(random_feeds(bundle.manifest.inputs, Bucket(1, length)))
    after = _memory_of_this_process()
print(after[1] - before[1])
"""


def run() -> list[Row]:
    bundle = open_bundle(minilm_lengths_bundle())
    engines = {(engine.submodel, engine.bucket): engine for engine in bundle.manifest.engines}
    largest_first = [entry.id for entry in sorted(bundle.manifest.submodels, key=lambda one: -one.parameters)]
    free = Bucket(1, _LONGEST, None, 1)
    rows = [_any_length(bundle.path, engines[largest_first[0], free].id, engines[largest_first[0], BUCKET].id)]
    for residency in RESIDENCIES:
        ids = [engines[submodel, free].id for submodel in largest_first]
        alone, together = (memory_use(bundle.path, some, residency, CORES) for some in (ids[:1], ids))
        private, resident = (
            (all_ - first) / (len(ids) - 1) / 1e6
            for all_, first in ((together.private, alone.private), (together.resident, alone.resident))
        )
        rows.append(
            Row(
                f"a further submodel of MiniLM, {residency}",
                f"{private:.0f} MB private, {resident:.0f} MB resident",
                "stated",
                True,
                f"mean of {len(ids) - 1} submodels beside the whole one ({alone.resident / 1e6:.0f} MB resident)",
            )
        )
    return rows


def _any_length(bundle: Path, free: str, static: str) -> Row:
    """Every length up to ``_LONGEST`` on the engine ``free``, over the lengths of the bucket of ``static``."""
    found = _resident(bundle, free, range(1, _LONGEST + 1))
    bucket = _resident(bundle, static, [BUCKET.sequence])
    return Row(
        f"serving lengths 1 to {_LONGEST}, whole MiniLM packed",
        f"{found / bucket:.2f}x ({found / 1e6:.0f} MB resident against {bucket / 1e6:.0f} MB)",
        "<= 1.1x",
        found <= 1.1 * bucket,
        f"one engine of the range 1x1..{_LONGEST} run at each length, over one of {BUCKET}; a process each",
    )


def _resident(bundle: Path, engine: str, lengths: range | list[int]) -> int:
    command = [sys.executable, "-c", _SERVING, json.dumps([str(bundle), engine, CORES, *lengths])]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)
