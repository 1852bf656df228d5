"""The submodel of every budget of a bundle, as a table and as a curve: quality over latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ..bundle.entries.engine_entry import EngineEntry
from ..bundle.figures import cell, heading
from ..bundle.open_bundle import Bundle
from ..runtime.calibrate.measure import time_in_turns
from ..runtime.consistency.measure import Consistency
from ..runtime.device.threads import threads_or_default
from ..runtime.engines.runner import runner_for
from ..runtime.inputs.arrays import random_feeds
from ..tables import Table
from ..tools.console import working

_RUNS = 20


@dataclass(frozen=True)
class BudgetPoint:
    """One budget and the submodel chosen for it; ``label`` is that of a trained level, or empty for a mixed one."""

    budget: str
    submodel: str
    label: str
    parameters: int
    flops: int
    milliseconds: float
    figures: Mapping[str, float]


def budget_points(bundle: Bundle, found: Consistency) -> list[BudgetPoint]:
    """Every budget of ``bundle``, smallest submodel first, with the figures ``found`` and the latency of its engine.

    Engines take turns, so that what else the machine does meets all of them alike: neighbours differ by a few percent.
    """
    manifest = bundle.manifest
    figures = {row.submodel: row.figures for row in found.submodels}
    entries = {entry.id: entry for entry in manifest.submodels}
    engines = {engine.submodel: engine for engine in manifest.engines if engine.segment is None}
    measured = time_engines(bundle, [engines[budget.submodel] for budget in manifest.budgets])
    points = []
    for budget in manifest.budgets:
        entry, engine = entries[budget.submodel], engines[budget.submodel]
        label = "/".join(entry.labels)
        points.append(
            BudgetPoint(
                budget.name, entry.id, label, entry.parameters, engine.flops, measured[engine.id], figures[entry.id]
            )
        )
    return sorted(points, key=lambda point: point.parameters)


def time_engines(bundle: Bundle, engines: Sequence[EngineEntry]) -> dict[str, float]:
    """Median milliseconds of one run, packed, by engine."""
    feeds = random_feeds(bundle.manifest.inputs, engines[0].bucket)
    with ExitStack() as stack:
        threads = threads_or_default(None)
        runners = [stack.enter_context(runner_for(bundle, engine, "packed", threads)) for engine in engines]
        with working() as progress:
            times = time_in_turns(
                [[partial(runner.run, feeds)] * _RUNS for runner in runners], progress, "time in turns"
            )
    return {engine.id: float(np.median(taken)) for engine, taken in zip(engines, times, strict=True)}


def points_table(points: Sequence[BudgetPoint], figure: str) -> Table:
    """One row per budget; ``figure`` and the agreement with the universal model."""
    names = [figure, *(name for name in points[0].figures if name.endswith("agreement"))]
    columns = ["budget", "level", "submodel", "M params", "MFLOP", "measured ms", *map(heading, names)]
    rows = [
        [
            point.budget,
            point.label,
            point.submodel,
            f"{point.parameters / 1e6:.3f}",
            f"{point.flops / 1e6:.2f}",
            f"{point.milliseconds:.3f}",
            *(cell(point.figures, name) for name in names),
        ]
        for point in points
    ]
    return Table(columns, rows)


def draw_curves(curves: Mapping[str, tuple[str, Sequence[BudgetPoint]]], path: Path) -> None:
    """Draws one panel per model, by title, with the name of its figure: a PNG in the place of any there was."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(5.5 * len(curves), 4), layout="constrained")
    panels = picture.subplots(1, len(curves), squeeze=False)[0]
    for axes, (title, (figure, points)) in zip(panels, curves.items(), strict=True):
        axes.plot([p.milliseconds for p in points], [p.figures[figure] for p in points], "-", color="0.7")
        for is_trained, marker, label in ((True, "o", "trained level"), (False, "s", "Mix'n'Match")):
            some = [point for point in points if bool(point.label) == is_trained]
            axes.plot([p.milliseconds for p in some], [p.figures[figure] for p in some], marker, label=label)
        for point in points:
            if point.label:
                axes.annotate(
                    point.label, (point.milliseconds, point.figures[figure]), xytext=(5, 5), textcoords="offset points"
                )
        axes.set_title(title)
        axes.set_xlabel("measured latency, ms")
        axes.set_ylabel(heading(figure))
        axes.legend()
    picture.savefig(path, format="png", dpi=120)
