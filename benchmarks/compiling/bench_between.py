"""Latencies of an engine of a range at sizes that were never measured, against what is interpolated for them."""

from __future__ import annotations

from statistics import median

from ...bucket import Bucket
from ...bundle.build_record import Latency, LatencyPoint
from ...bundle.open_bundle import open_bundle
from ...runtime.engines.latencies import latency_at
from ...runtime.engines.measure import Timed, best_of_rounds, measured_shapes, with_measured
from ...runtime.engines.runner import runner_for
from ...runtime.inputs.feeds import random_feeds
from ..harness import Row
from ..subjects import CORES, minilm_range_bundle

# Between the powers of two at which engines are measured, and between one row and 32.
_LENGTHS = (3, 6, 12, 24, 48, 90, 180, 350)
_ROWS = (1, 2, 5, 12, 24)
# A benchmark of minutes: what takes longer than this many tokens is left out.
_MOST_TOKENS = 2400


def run() -> list[Row]:
    """All sizes are timed in the same interleaved rounds, so that a host that changes its speed does not decide."""
    bundle = open_bundle(minilm_range_bundle())
    engine = bundle.manifest.engines[0]
    known = measured_shapes(engine.bucket)
    asked = [Bucket(rows, length) for rows in _ROWS for length in _LENGTHS if rows * length <= _MOST_TOKENS]
    with runner_for(bundle, engine, "packed", CORES) as runner:
        timed = [Timed(runner, random_feeds(bundle.manifest.inputs, shape), False) for shape in (*known, *asked)]
        measured = dict(zip((*known, *asked), best_of_rounds(timed), strict=True))
    points = (with_measured(LatencyPoint(shape.batch, shape.sequence, 0.0), measured[shape]) for shape in known)
    predicted = latency_at(Latency(engine.id, 0.0, points=tuple(points)))
    noise = [measured[shape].noise for shape in asked]
    repeats = [one.repeat_ratio - 1 for one in noise if one.repeat_ratio is not None]
    others = noise[0].others_share
    how = (
        f"whole MiniLM packed, measured at {len(known)} sizes; measured twice a size differs by {median(repeats):.1%} "
        f"(median), {max(repeats):.1%} (worst); others used {'?' if others is None else f'{others:.0%}'} of the CPUs"
    )
    rows = []
    for name, shapes in (
        ("one row", [shape for shape in asked if shape.batch == 1]),
        ("2 to 24 rows", [shape for shape in asked if shape.batch > 1]),
    ):
        errors = [abs(predicted(shape).p50_ms / measured[shape].p50_ms - 1) for shape in shapes]
        rows.append(
            Row(
                f"latency at {len(shapes)} sizes never measured, {name}",
                f"median {median(errors):.1%}, worst {max(errors):.1%} off",
                "median < 5 %, worst < 20 %",
                median(errors) < 0.05 and max(errors) < 0.20,
                how,
            )
        )
    return rows
