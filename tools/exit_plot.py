"""A calibrated policy as a picture: quality over cost, and where rows leave. Needs matplotlib, which is optional."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from ..runtime.calibrate.budget import parse_budget
from ..runtime.exits.calibration import CalibratedPolicy, Costs
from ..whole_file import write_whole

FORMATS = (".svg", ".png")


def plot_exits(policy: CalibratedPolicy, path: Path) -> bool:
    """Draws ``policy`` into a new ``.svg`` or ``.png`` file; False, and nothing drawn, where matplotlib is missing.

    Raises OutputError if the file exists or cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    # The same figures make the same file.
    with rc_context({"svg.hashsalt": "nestforge"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        curve, exits = figure.subplots(1, 2)
        _draw_curve(curve, policy)
        _draw_exits(exits, policy)
        drawn = BytesIO()
        suffix = path.suffix[1:].lower()
        figure.savefig(drawn, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
    write_whole(path, lambda stream: stream.write(drawn.getvalue()), "the plot", new=True)
    return True


def _draw_curve(axes: Any, policy: CalibratedPolicy) -> None:
    asked = parse_budget(policy.budget)
    budget = asked.resolved(asked.of(policy.whole.costs))
    divisor = 1.0 if budget.is_latency else 1e6

    def cost(costs: Costs) -> float:
        return budget.of(costs) / divisor

    points = sorted((cost(point.simulated.costs), point.simulated.quality) for point in policy.curve)
    axes.plot(*zip(*points, strict=True), "-", color="0.6", label="one threshold for all exits")
    common = policy.global_point.simulated
    axes.plot(cost(common.costs), common.quality, "s", color="C0", label="the one that spends the budget")
    axes.plot(cost(policy.simulated.costs), policy.simulated.quality, "o", color="C3", label=f"chosen: {policy.name}")
    axes.plot(cost(policy.whole.costs), policy.whole.quality, "D", color="C2", label="whole engine")
    if policy.held_out is not None:
        held_out = policy.held_out
        axes.plot(cost(held_out.costs), held_out.quality, "x", color="C3", label="chosen, on held-out rows")
    axes.axvline(cost_limit := budget.limit / divisor, linestyle=":", color="k")
    share = f": {asked.limit:g} % of the whole engine" if asked.is_share else ""
    axes.annotate(f" budget{share}", (cost_limit, 0), xycoords=("data", "axes fraction"), va="bottom", fontsize="small")
    what = budget.metric.removesuffix("_ms").replace("_", " ")
    axes.set_xlabel(f"{what} per request, ms" if budget.is_latency else "mean FLOPs per row, millions")
    axes.set_ylabel(policy.quality_is.replace("_", " "))
    axes.legend(fontsize="x-small")


def _draw_exits(axes: Any, policy: CalibratedPolicy) -> None:
    parts = [("calibration rows", policy.histogram)]
    if policy.held_out is not None:
        parts.append(("held-out rows", policy.held_out.histogram))
    width = 0.8 / len(parts)
    for place, (label, counts) in enumerate(parts):
        positions = [number + 1 + (place - (len(parts) - 1) / 2) * width for number in range(len(counts))]
        axes.bar(positions, [count / sum(counts) for count in counts], width, label=label)
    axes.set_xticks(range(1, len(policy.histogram) + 1))
    axes.set_xlabel("exit")
    axes.set_ylabel("share of rows that leave there")
    axes.legend(fontsize="x-small")
