"""The paper's Tables 4, 8 and 9 at the size of the demonstration, and what a lower budget costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...bucket import Bucket
from ...runtime.summary import Table
from .report import Measured

CAPACITY, GROUP, EXPERTS = "moe.capacity_factor", "moe.group_size", "moe.experts"


def routers_table(found: Sequence[Measured], routed: Sequence[str], peer: str) -> Table:
    """Table 4: the models ``routed`` by their routers, at full budget, and how much faster than ``peer`` they are."""
    columns = ["router", "masked-token accuracy %", "loss nats", "tokens dropped %", "ms per row", "speed-up"]
    whole = _whole(found)
    rows = []
    for name in routed:
        one = whole[name]
        rows.append([name, *_quality(one), _dropped(one), f"{one.milliseconds:.3f}", _faster(one, whole[peer])])
    return Table(columns, rows)


def compute_table(found: Sequence[Measured], models: Sequence[str], fast: str, peer: str) -> Table:
    """Table 8: what a row costs in each of ``models``, in ``fast`` also at half its capacity, beside ``peer``."""
    columns = ["model", "MFLOP per row", "M parameters", "masked-token accuracy %", "ms per row", "speed-up"]
    whole = _whole(found)
    rows = []
    for name in models:
        rows.append(_compute_row(name, whole[name], whole[peer]))
        if name == fast:
            (half,) = (one for one in found if one.model == fast and _lowered(one, whole[fast]) == {CAPACITY: 50})
            rows.append(_compute_row(f"{name}, capacity 50 %", half, whole[peer]))
    return Table(columns, rows)


def capacity_table(found: Sequence[Measured], peer: str) -> Table:
    """Table 9: every model that routes, at each capacity and number of tokens that are routed together, with all its
    experts. Where a batch is no larger than several of the groups that were compiled, they are one row."""
    columns = [
        *("model", "capacity %", "group tokens", "masked-token accuracy %", "loss nats", "tokens dropped %"),
        *("MFLOP per row", "ms per row", "speed-up"),
    ]
    whole = _whole(found)
    budgets = {
        (one.model, one.group, one.values[CAPACITY]): one  # the last has the largest group
        for one in sorted(found, key=lambda one: one.values.get(GROUP, 0))
        if one.group is not None and EXPERTS not in _lowered(one, whole[one.model])
    }
    rows = []
    for model in dict.fromkeys(one.model for one in found):
        for (_, group, capacity), one in sorted(budgets.items(), reverse=True):
            if one.model == model:
                budget = [str(capacity), str(group)]
                rows.append([model, *budget, *_quality(one), _dropped(one), *_cost(one), _faster(one, whole[peer])])
    return Table(columns, rows)


def experts_table(found: Sequence[Measured], model: str) -> Table:
    """``model`` with fewer of its experts, all of them at the capacity and the group of training."""
    columns = [
        *("experts kept", "M parameters", "masked-token accuracy %", "loss nats", "tokens dropped %"),
        *("MFLOP per row", "ms per row"),
    ]
    whole = _whole(found)[model]
    rows = []
    for one in found:
        if one.model == model and _lowered(one, whole).keys() <= {EXPERTS}:
            facts = [str(one.values[EXPERTS]), f"{one.parameters / 1e6:.2f}"]
            rows.append([*facts, *_quality(one), _dropped(one), *_cost(one)])
    return Table(columns, rows)


def seeds_table(runs: Mapping[str, Mapping[str, float]]) -> Table:
    """Accuracy in percent of every training (name to accuracy by budget), as PyTorch measured it on the same rows."""
    budgets = list(dict.fromkeys(budget for run in runs.values() for budget in run))
    rows = [
        [name, *(f"{100 * run[budget]:.2f}" if budget in run else "-" for budget in budgets)]
        for name, run in runs.items()
    ]
    return Table(["training", *budgets], rows)


def heading(bucket: Bucket) -> str:
    """A bucket in words."""
    rows = "one row" if bucket.batch == 1 else f"{bucket.batch} rows"
    return f"{rows} of {bucket.sequence} tokens a run"


def _compute_row(name: str, one: Measured, peer: Measured) -> list[str]:
    flops, milliseconds = _cost(one)
    return [name, flops, f"{one.parameters / 1e6:.2f}", f"{100 * one.accuracy:.2f}", milliseconds, _faster(one, peer)]


def _whole(found: Sequence[Measured]) -> dict[str, Measured]:
    """The engine of every model with its full budget."""
    largest: dict[str, Measured] = {}
    for one in found:
        best = largest.get(one.model)
        if best is None or all(one.values[kind] >= value for kind, value in best.values.items()):
            largest[one.model] = one
    return largest


def _lowered(one: Measured, whole: Measured) -> dict[str, int]:
    """The values that are less than the full ones."""
    return {kind: value for kind, value in one.values.items() if value < whole.values[kind]}


def _quality(one: Measured) -> list[str]:
    return [f"{100 * one.accuracy:.2f}", f"{one.loss:.3f}"]


def _dropped(one: Measured) -> str:
    return f"{100 * sum(one.dropped.values()) / len(one.dropped):.1f}" if one.dropped else "-"


def _cost(one: Measured) -> list[str]:
    return [f"{one.flops / 1e6:.1f}", f"{one.milliseconds:.3f}"]


def _faster(one: Measured, peer: Measured) -> str:
    return f"{peer.milliseconds / one.milliseconds:.2f}"
