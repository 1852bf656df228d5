"""One budget to one submodel: the largest rung of the ladder that keeps every limit, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from ...bundle.manifest import Limits
from ...errors import PlanError
from ...profiles.budget import BudgetSpec, resolve_limit
from ...profiles.device_profile import DeviceProfile
from .candidate import Candidate


@dataclass(frozen=True)
class Rejection:
    """A rung that a budget rules out, and by which limits."""

    submodel: str
    reason: str


@dataclass(frozen=True)
class BudgetPlan:
    """One budget: its limits in absolute units, the submodel chosen for it and why, and the rungs ruled out."""

    name: str
    limits: Limits
    submodel: str
    reason: str
    rejected: tuple[Rejection, ...]


def choose(name: str, budget: BudgetSpec, rungs: Sequence[Candidate], profile: DeviceProfile, basis: str) -> BudgetPlan:
    """The largest of ``rungs`` that keeps the limits of ``budget``. Raises PlanError if none does."""
    limits = _resolve(budget, rungs[-1].figures)
    if limits.ffn_parameters is not None and rungs[-1].ffn_parameters == 0:
        raise PlanError(f"budget {name!r}: ffn_parameters: this model has no feed-forward networks that shrink")
    checks = _checks(limits, profile, basis)
    broken = {rung.id: _broken(rung, checks) for rung in rungs}
    fitting = [index for index, rung in enumerate(rungs) if not broken[rung.id]]
    if not fitting:
        shorter = ", a shorter range (`buckets`)" if any(not bucket.is_static for bucket in profile.buckets) else ""
        raise PlanError(
            f"budget {name!r}: {_nearest(rungs, checks, broken, profile)}; "
            f"raise the limit, add smaller levels{shorter}, or state other `budgets`"
        )
    chosen = fitting[-1]
    figures = rungs[chosen].figures
    kept = ", ".join(f"{c.what} {c.show(figures[c.figure])} of {c.show(c.limit)}" for c in checks if not c.of_device)
    if chosen == len(rungs) - 1:
        reason = f"the universal model keeps {kept}" if kept else "no limits: the universal model"
    else:
        reason = (
            f"rung {chosen + 1} of {len(rungs)} is the largest that keeps {kept or 'the memory of the device'}; "
            f"in the next, {rungs[chosen + 1].label}, {broken[rungs[chosen + 1].id]}"
        )
    rejected = tuple(Rejection(rung.id, broken[rung.id]) for rung in rungs if broken[rung.id])
    return BudgetPlan(name, limits, rungs[chosen].id, reason, rejected)


@dataclass(frozen=True)
class _Check:
    """One upper limit on one figure of a candidate, and how to speak of it."""

    figure: str
    what: str
    limit: float
    of_device: bool = False

    def show(self, value: float) -> str:
        """``value`` with its unit; 1 MB is 10^6 bytes."""
        match self.figure:
            case "latency_ms":
                return f"{value:.3f} ms"
            case "memory_mb":
                return f"{value:.2f} MB"
            case "flops":
                return f"{value / 1e6:,.2f} MFLOP"
            case _:
                return f"{value:,.0f}"


def _checks(limits: Limits, profile: DeviceProfile, basis: str) -> list[_Check]:
    bucket = profile.budget_shape.label
    own = [
        ("latency_ms", f"latency ({basis}, {bucket})", limits.latency_ms),
        ("memory_mb", "memory", limits.memory_mb),
        ("parameters", "parameters", limits.parameters),
        ("flops", f"compute ({bucket})", limits.flops),
        ("non_embedding_parameters", "non-embedding parameters", limits.non_embedding_parameters),
        ("ffn_parameters", "FFN parameters", limits.ffn_parameters),
    ]
    device = _Check("memory_mb", f"memory of {profile.name}", profile.memory_mb, of_device=True)
    return [*(_Check(figure, what, limit) for figure, what, limit in own if limit is not None), device]


def _broken(candidate: Candidate, checks: Sequence[_Check]) -> str:
    """Every limit that ``candidate`` breaks and by how much; empty if none."""
    figures = candidate.figures
    return ", ".join(
        f"{check.what} {check.show(value)} exceeds {check.show(check.limit)} by {check.show(value - check.limit)}"
        for check in checks
        if (value := figures[check.figure]) > check.limit
    )


def _nearest(
    rungs: Sequence[Candidate], checks: Sequence[_Check], broken: Mapping[str, str], profile: DeviceProfile
) -> str:
    """Which of ``rungs``, where none fits, fails by least: the smallest, or of several precisions the one whose
    worst figure is the smallest multiple of its limit."""
    if len(profile.precisions) == 1:
        return f"not even the smallest submodel {rungs[0].label} fits: {broken[rungs[0].id]}"

    def excess(rung: Candidate) -> float:
        figures = rung.figures
        return max(figures[check.figure] / check.limit if check.limit else inf for check in checks)

    closest = min(rungs, key=excess)
    return f"no submodel fits in any precision; {closest.label} comes closest: {broken[closest.id]}"


def _resolve(budget: BudgetSpec, universal: Mapping[str, float]) -> Limits:
    """The limits in absolute units; counts are rounded down to whole ones."""

    def whole(name: str) -> int | None:
        limit = resolve_limit(getattr(budget, name), universal[name])
        return None if limit is None else int(limit)

    return Limits(
        latency_ms=resolve_limit(budget.latency_ms, universal["latency_ms"]),
        memory_mb=resolve_limit(budget.memory_mb, universal["memory_mb"]),
        parameters=whole("parameters"),
        flops=whole("flops"),
        non_embedding_parameters=whole("non_embedding_parameters"),
        ffn_parameters=whole("ffn_parameters"),
    )
