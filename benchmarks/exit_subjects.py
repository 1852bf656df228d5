"""Subject of the benchmarks of early exits: the trained slender model compiled for this host, and real texts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from ..bucket import Bucket
from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.open_bundle import Bundle, open_bundle
from ..compiler.compile import compile_bundle
from ..errors import CheckpointError
from ..examples.commands import is_made_from
from ..examples.cost_eff.report import read_texts
from ..profiles.load_profile import load_profile
from ..runtime.calibrate.calibrate import calibrate
from ..runtime.calibrate.data import read_data, split
from ..runtime.calibrate.simulate import parse_budget
from ..runtime.exits.calibration import CalibratedPolicy
from ..runtime.inputs.text import TextEncoder
from .harness import CACHE

# Texts are cut to 64 tokens, as they were in training; published costs are of 128.
SEQUENCE, LONGEST = 64, 128
FOLDER = Path("demo/exits")  # where `make demo-exits` trains
BATCHES = (1, 8, 32)
EXITS = (2, 4, 6)
# Between the batches of requests stand those to which survivors shrink.
_BUCKETS = (
    *(Bucket(batch, sequence) for sequence in (32, SEQUENCE) for batch in (1, 2, 4, 8, 16, 32)),
    *(Bucket(batch, LONGEST) for batch in BATCHES),
)


def model_folder() -> Path:
    """The slender model of ``make demo-exits``. Raises CheckpointError if it was not trained yet."""
    folder = FOLDER / "slender"
    if not folder.exists():
        raise CheckpointError(f"{folder}: not trained yet; `make demo-exits` trains it (about 10 minutes, once)")
    return folder


@cache
def exits_bundle() -> Bundle:
    """The slender model cut at three exits, for every batch to which requests may shrink; once per training."""
    return _compiled("exits.bundle", _BUCKETS)


def _compiled(name: str, buckets: Sequence[Bucket]) -> Bundle:
    path = CACHE / name
    if path.exists() and not is_made_from(path, model_folder()):
        shutil.rmtree(path)
    if not path.exists():
        profile = replace(load_profile("host-cpu"), buckets=tuple(buckets), budgets={})
        compile_bundle(model_folder(), profile, path, exits=EXITS, levels={"depth": (1.0,)}, include="budgets")
    return open_bundle(path)


def whole_engine(bundle: Bundle, bucket: Bucket) -> EngineEntry:
    """The engine without exits at ``bucket``."""
    return next(e for e in bundle.manifest.engines if e.segment is None and e.bucket == bucket)


def requests(bundle: Bundle, batch: int, count: int, source: str = "test") -> list[dict[str, Any]]:
    """Real texts as ``count`` requests of ``batch`` rows, cut to the bucket's length and padded to the longest row."""
    entry = bundle.manifest.text
    assert entry is not None
    encoder = TextEncoder(bundle.file(entry.file), entry, bundle.manifest.inputs)
    texts = read_texts(FOLDER / f"{source}.jsonl").texts
    picked = [texts[(start * batch) % (len(texts) - batch) :][:batch] for start in range(count)]
    return [dict(encoder.encode(part, SEQUENCE, truncate=True).feeds) for part in picked]


def unseen(bundle: Bundle) -> list[dict[str, Any]]:
    """Every text that neither training nor the search for thresholds saw, as requests of one row: the part of the
    calibration texts that is held out, and the test texts, which come from other modules."""
    whole = [
        read_data(FOLDER / f"{source}.jsonl", bundle, SEQUENCE, truncate=True) for source in ("calibration", "test")
    ]
    held_out = split(whole[0])[1]
    assert held_out is not None
    return [
        {name: array[[row], :length] for name, array in part.feeds.items()}
        for part in (held_out, whole[1])
        for row, length in enumerate(part.lengths)
    ]


def calibrated(bundle: Bundle, budget: str, batch: int = 1) -> CalibratedPolicy:
    """A policy for ``budget``, found on the calibration texts on this host."""
    data = FOLDER / "calibration.jsonl"
    return calibrate(bundle, data, parse_budget(budget), batch=batch, name="bench", truncate=True)


@cache
def half_the_flops() -> CalibratedPolicy:
    """The policy under which a text costs half of the FLOPs that the whole engine takes at the text's own bucket."""
    bundle = exits_bundle()
    lengths = [feeds["input_ids"].shape[1] for feeds in requests(bundle, 1, 500, "calibration")]
    whole = [whole_engine(bundle, Bucket(1, 32 if length <= 32 else SEQUENCE)).flops for length in lengths]
    return calibrated(bundle, f"mean_flops<={0.5 * mean(whole):.4g}")
