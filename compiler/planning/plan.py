"""Budget to submodel: climb the promotion ladder as far as every limit of the budget allows.

A plan is pure data (``strict.unstructure`` makes JSON of it) and a pure function of its inputs: nothing is traced,
nothing measured. Latencies in it are predicted or, given corrections, corrected; never measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from ...bucket import Bucket
from ...bundle.manifest import Limits
from ...elastic import Submodel
from ...errors import PlanError
from ...exporters.published_slices import TableRow
from ...exporters.source import ModelSource
from ...profiles.budget import LIMITS, BudgetSpec, resolve_limit
from ...profiles.device_profile import DeviceProfile
from ...profiles.host_load import load_warning
from ...tables import as_html
from .candidate import Candidate, Corrections, candidate_of
from .compile_cost import CompileCost
from .levels import Level, letters, rung_labels, unusual

# Figures that are no counts.
_FRACTIONS = ("latency_ms", "memory_mb")


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


@dataclass(frozen=True, repr=False)
class Plan:
    """Submodels to compile for one model and one device profile.

    Limits hold at the shape ``budget_bucket``, or what a candidate has in its place; ``latency_basis`` says which
    latency they were judged by. ``notes`` states what was rounded, what is unusual about submodels that were requested
    by id, which budgets were left out, which of several precisions none chose, and rates of a busy host. ``cost`` is
    what compiling them is estimated to take of this host.
    """

    model: str
    profile: str
    budget_bucket: Bucket
    latency_basis: Literal["predicted", "corrected"]
    candidates: tuple[Candidate, ...]
    budgets: tuple[BudgetPlan, ...]
    notes: tuple[str, ...] = ()
    cost: CompileCost | None = None

    def __repr__(self) -> str:
        budgets = ", ".join(f"{budget.name}: {budget.submodel}" for budget in self.budgets)
        return f"Plan({self.model} for {self.profile}, {len(self.candidates)} candidates; {budgets or 'no budgets'})"

    def _repr_html_(self) -> str:
        chosen: dict[str, list[str]] = {}
        for budget in self.budgets:
            chosen.setdefault(budget.submodel, []).append(budget.name)
        return as_html(
            f"Plan of {self.model} for {self.profile}, limits at {self.budget_bucket}",
            [
                *((f"budget {budget.name}", budget.reason) for budget in self.budgets),
                *([("a compile takes", str(self.cost))] if self.cost else []),
                *(("note", n) for n in self.notes),
            ],
            ["labels", "submodel", "M params", "memory MB", f"{self.latency_basis} ms", "budgets"],
            [
                [
                    "/".join(one.labels) or "-",
                    one.id,
                    f"{one.parameters / 1e6:.2f}",
                    f"{one.memory_mb:.1f}",
                    f"{one.budget_cost.latency_ms:.2f}",
                    ", ".join(chosen.get(one.id, ())),
                ]
                for one in self.candidates
            ],
        )


def make_plan(
    source: ModelSource,
    profile: DeviceProfile,
    *,
    levels: Sequence[Level],
    submodels: Sequence[Submodel] = (),
    tabled: Iterable[tuple[Submodel, TableRow]] = (),
    corrections: Corrections | None = None,
) -> Plan:
    """For every budget of ``profile`` the largest rung of the ladder that keeps all its limits.

    ``submodels`` are candidates beside the ladder, to be compiled because they were requested; budgets do not choose
    them. Those ``tabled`` are called as their rows say. ``corrections`` must cover every bucket and precision of the
    profile, or be left out.
    Raises PlanError if every rung breaks a limit, naming the budget, the rung that comes closest, the limit and that
    rung's figure; an optional budget is then left out, and a note says so. Raises ValueError for a source whose
    submodels are in other precisions than the profile's.
    """
    in_source = getattr(source, "precisions", profile.precisions)
    if in_source != profile.precisions:
        raise ValueError(f"precisions: the source has {in_source}, the profile {profile.precisions}")
    corrections = corrections or {}
    if corrections and set(corrections) != {(b, p) for b in profile.buckets for p in profile.precisions}:
        raise ValueError("corrections: expected one for every bucket and precision of the profile")
    rungs = rung_labels(levels, profile)
    called: dict[Submodel, list[TableRow]] = {}
    for submodel, row in tabled:
        called.setdefault(submodel, []).append(row)
    unnamed = dict.fromkeys(s for s in submodels if s not in rungs and s not in called)
    extra = letters(unnamed) | {submodel: () for submodel in called if submodel not in rungs}

    def candidate(submodel: Submodel, labels: tuple[str, ...], rung: int | None) -> Candidate:
        rows = called.get(submodel, [])
        found = candidate_of(source, profile, corrections, submodel, (*labels, *(row.name for row in rows)), rung)
        return replace(found, states={column: value for row in rows for column, value in row.states.items()} or None)

    taken = {label for own in (rungs | extra).values() for label in own} | {one.id for one in (*rungs, *extra)}
    for rows in called.values():
        if clash := next((row for row in rows if row.name in taken), None):
            raise PlanError(f"{clash.where}: name: {clash.name!r} is the name of another submodel; call it otherwise")
        first = rows[0]
        for row in rows[1:]:
            if {column for column, value in row.states.items() if first.states.get(column, value) != value}:
                raise PlanError(f"{row.where}: is the submodel of {first.where}, with other figures; take one of them")
    on_ladder = [candidate(s, own, i) for i, (s, own) in enumerate(rungs.items())]
    beside = [candidate(s, own, None) for s, own in extra.items()]
    basis: Literal["predicted", "corrected"] = "corrected" if corrections else "predicted"
    budgets: list[BudgetPlan] = []
    left_out: list[str] = []
    for name, budget in profile.budgets.items():
        try:
            budgets.append(choose(name, budget, on_ladder, profile, basis))
        except PlanError as failure:
            if not budget.optional:
                raise
            left_out.append(f"{failure}; this budget is optional and was left out")
    return Plan(
        model=source.name,
        profile=profile.name,
        budget_bucket=profile.budget_shape,
        latency_basis=basis,
        candidates=(*on_ladder, *beside),
        budgets=tuple(budgets),
        notes=(
            *(note for level in levels for note in level.rounding),
            *unusual(unnamed, levels),
            *left_out,
            *_of_a_busy_host(profile),
            *_unchosen(on_ladder, budgets, profile),
        ),
    )


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

    limits: dict[str, Any] = {name: resolve_limit(getattr(budget, name), universal[name]) for name in LIMITS}
    counts = {name: int(limit) for name, limit in limits.items() if limit is not None and name not in _FRACTIONS}
    return Limits(**limits | counts)


def _of_a_busy_host(profile: DeviceProfile) -> list[str]:
    """A note where predictions rest on rates that were measured beside other programs."""
    busy = load_warning(profile.rates.others_share)
    if busy is None:
        return []
    return [
        f"profile {profile.name}: {busy} while its rates were measured, so that predicted latencies are too high; "
        "`nestforge profile` measures them again once the host is quiet"
    ]


def _unchosen(rungs: Sequence[Candidate], budgets: Sequence[BudgetPlan], profile: DeviceProfile) -> list[str]:
    """A note for each of several precisions that no budget chose."""
    chosen = {budget.submodel for budget in budgets}
    used = {rung.precision for rung in rungs if rung.id in chosen}
    return [
        f"{precision}: no budget chose it; `include='levels'` builds it all the same"
        for precision in profile.precisions
        if len(profile.precisions) > 1 and precision not in used
    ]
