"""The picture of a nested model: its levels as the nested folder and the bundle made of it state them."""

from __future__ import annotations

from pathlib import Path

from nestforge.compiler.compile import compile_bundle
from nestforge.compiler.nest.nest import nest
from nestforge.examples.nest.__main__ import draw_levels, level_points, points_table
from support.tiny_compile import board, save_tiniest
from support.tiny_models import add_pooling, corpus


def test_every_level_has_its_worth_and_its_latency(tmp_path: Path) -> None:
    model, text = save_tiniest(tmp_path / "model"), corpus(tmp_path / "corpus.txt")
    add_pooling(model)
    report = nest(model, text, tmp_path / "nested", steps=2)
    compile_bundle(report.output, board(budgets={"full": {}}), tmp_path / "nested.bundle")

    points = level_points(report.output, tmp_path / "nested.bundle")
    stated = [(level.label, level.submodel, level.ranked, level.nested) for level in report.levels]
    assert [(point.label, point.submodel, point.ranked, point.nested) for point in points] == stated
    assert all(point.milliseconds > 0 for point in points)
    assert [row[:2] for row in points_table(points).rows] == [[label, submodel] for label, submodel, *_ in stated]

    for name in ("curve.svg", "again.svg"):
        draw_levels(points, tmp_path / name)
    drawn = (tmp_path / "curve.svg").read_text()
    assert drawn == (tmp_path / "again.svg").read_text()
    assert all(f"<!-- {point.label} -->" in drawn for point in points)
