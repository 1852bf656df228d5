"""``make demo-nest``: teach all-MiniLM-L6-v2's narrow submodels to answer, and draw quality over latency.

Training is done once, and so is the compile. The latencies are measured anew each time, in turns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...bundle.open_bundle import open_bundle
from ...compiler.nest import RECORD_NAME
from ...tables import Table
from ...tools.console import print_table
from ..budget_curve import time_engines
from ..commands import compile_once, demonstrate, nestforge
from ..encoder.corpus import demo_checkpoint, write_corpus

FOLDER = Path("demo/nest")
CORPUS, NESTED, BUNDLE, PICTURE = (FOLDER / name for name in ("corpus.txt", "nested", "nested.bundle", "curve.svg"))
BUCKET = "1x128"


@dataclass(frozen=True)
class LevelPoint:
    """A level: its submodel, the median latency of that, and the mean cosine of its answers to the original model's,
    cut from the original as it was (``ranked``: by importance) and cut from the nested one."""

    label: str
    submodel: str
    milliseconds: float
    ranked: float
    nested: float


def steps() -> None:
    checkpoint = demo_checkpoint()
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(f"{CORPUS}: {write_corpus(CORPUS)} lines of text from Python's own docstrings")
    if not NESTED.exists():
        nestforge("nest", str(checkpoint), "--text", str(CORPUS), "--output", str(NESTED))
    compile_once(NESTED, BUNDLE, "--profile", "host-cpu", "--bucket", BUCKET, "--text", str(CORPUS))
    points = level_points(NESTED, BUNDLE)
    table = points_table(points)
    print(f"\nFFN cut, bucket {BUCKET}; cosine: mean to the original model on held-out texts\n", flush=True)
    print_table(table.columns, table.rows)
    draw_levels(points, PICTURE)
    print(f"\nThe curve: {PICTURE.resolve()}")


def level_points(nested: Path, bundle_path: Path) -> list[LevelPoint]:
    """Every level of the folder that ``nestforge nest`` wrote, smallest first, as the bundle made of it answers."""
    bundle = open_bundle(bundle_path)
    levels = json.loads((nested / RECORD_NAME).read_text())["levels"]
    engines = {engine.submodel: engine for engine in bundle.manifest.engines}
    measured = time_engines(bundle, [engines[level["submodel"]] for level in levels])
    return [
        LevelPoint(
            level["label"],
            level["submodel"],
            measured[engines[level["submodel"]].id],
            level["ranked"],
            level["nested"],
        )
        for level in levels
    ]


def points_table(points: Sequence[LevelPoint]) -> Table:
    """One row per level."""
    rows = [
        [point.label, point.submodel, f"{point.milliseconds:.2f}", f"{point.ranked:.4f}", f"{point.nested:.4f}"]
        for point in points
    ]
    return Table(["level", "submodel", "measured ms", "cosine, never nested", "cosine, nested"], rows)


def draw_levels(points: Sequence[LevelPoint], path: Path) -> None:
    """Draws both curves as an SVG in the place of any there was; the same points give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    milliseconds = [point.milliseconds for point in points]
    picture = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = picture.subplots()
    axes.plot(milliseconds, [point.nested for point in points], "o-", label="nested: 8 minutes of nestforge nest")
    axes.plot(
        milliseconds, [point.ranked for point in points], "s--", color="0.5", label="never nested, cut by importance"
    )
    for point in points:
        where = (point.milliseconds, point.nested)
        axes.annotate(point.label, where, xytext=(0, 7), textcoords="offset points", ha="center")
    axes.set_ylim(top=1.03)
    axes.set_xlabel(f"latency at {BUCKET}, ms")
    axes.set_ylabel("mean cosine to the original")
    axes.grid(color="0.92")
    axes.legend(loc="lower right")
    with rc_context({"svg.hashsalt": "nestforge"}):
        picture.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(demonstrate(steps))
