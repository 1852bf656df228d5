from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nestforge.errors import OutputError
from nestforge.runtime.exits.calibration import CalibratedPolicy, Costs, CurvePoint, Figures
from nestforge.tools import exit_plot
from nestforge.tools.exit_plot import plot_exits


def figures(depth: float) -> Figures:
    return Figures(10, Costs(depth * 1e6, depth, depth, depth, depth), depth / 4, (5, 2, 3))


POINTS = tuple(CurvePoint(0.1 * step, figures(3 - step / 2)) for step in range(4))
POLICY = CalibratedPolicy(
    name="lean",
    submodel="depth4",
    budget="mean_flops<=2.5e6",
    batch=1,
    thresholds=(0.1, 0.2),
    compare="<=",
    rule="per_row",
    histogram=(5, 2, 3),
    quality_is="agreement_with_last_exit",
    data_sha256="0" * 64,
    rows=10,
    truncated_rows=0,
    correction=1.0,
    simulated=figures(2),
    measured=figures(2),
    whole=figures(3),
    held_out=figures(2.1),
    held_out_whole=figures(3),
    curve=POINTS,
    global_point=POINTS[1],
    best_point=POINTS[1],
    engines=(),
    processor="a processor",
    threads=1,
    created="2026-11-21T00:00:00+00:00",
)


def test_both_panels_are_drawn_and_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        assert plot_exits(POLICY, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.count('id="axes_') == 2
    assert (tmp_path / "b.svg").read_text() == drawn


def test_a_latency_without_held_out_rows_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    policy = replace(POLICY, held_out=None, budget="p95_latency_ms<=2")
    assert plot_exits(policy, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("budget", "place", "text"),
    [("mean_flops<=2.5e6", 2.5, " budget"), ("p95_latency_ms<=50%", 1.5, " budget: 50 % of the whole engine")],
)
def test_the_budget_stands_where_it_came_to(budget: str, place: float, text: str) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    exit_plot._draw_curve(axes, replace(POLICY, budget=budget))
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [place]
    assert [note.get_text() for note in axes.texts] == [text]


def test_no_file_is_overwritten_and_none_is_made_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.svg"
    path.write_text("mine")
    with pytest.raises(OutputError, match="exists already; choose another file"):
        plot_exits(POLICY, path)
    assert path.read_text() == "mine"
    with pytest.raises(OutputError, match="cannot be written \\(No such file or directory\\)"):
        plot_exits(POLICY, tmp_path / "none" / "a.svg")


def test_without_matplotlib_nothing_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert not plot_exits(POLICY, tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()
