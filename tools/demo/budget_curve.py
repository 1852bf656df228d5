"""What every budget of a bundle got, as a table and as a curve: quality over latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...runtime.bundle import Bundle
from ...runtime.consistency.figures import cell, heading
from ...runtime.consistency.report import Consistency
from ...runtime.tables import Table


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
    """Every budget of ``bundle``, smallest submodel first, with its measured latency and the figures ``found``."""
    manifest = bundle.manifest
    figures = {row.submodel: row.figures for row in found.submodels}
    entries = {entry.id: entry for entry in manifest.submodels}
    engines = {engine.submodel: engine for engine in manifest.engines if engine.segment is None}
    measured = {latency.engine: latency.measured_p50_ms for latency in bundle.build.latencies}
    points = []
    for budget in manifest.budgets:
        entry, engine = entries[budget.submodel], engines[budget.submodel]
        took = measured[engine.id]
        assert took is not None
        label = "/".join(entry.labels)
        points.append(
            BudgetPoint(budget.name, entry.id, label, entry.parameters, engine.flops, took, figures[entry.id])
        )
    return sorted(points, key=lambda point: point.parameters)


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
