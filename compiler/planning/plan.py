"""Budget to submodel: climb the promotion ladder as far as every limit of the budget allows.

A plan is pure data (``strict.unstructure`` makes JSON of it) and a pure function of its inputs: nothing is traced,
nothing measured. Latencies in it are predicted or, given corrections, corrected; never measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...bucket import Bucket
from ...elastic import Submodel
from ...errors import PlanError
from ...notebook import as_html
from ...profiles.device_profile import DeviceProfile
from ...profiles.host_load import load_warning
from .assignments import unusual
from .candidate import Candidate, Corrections, Source, candidate_of
from .choose import BudgetPlan, choose
from .labels import letters, rung_labels
from .levels import Level


@dataclass(frozen=True, repr=False)
class Plan:
    """What to compile for one model and one device profile.

    Limits hold at the shape ``budget_bucket``, or what a candidate has in its place; ``latency_basis`` says which
    latency they were judged by. ``notes`` states what was rounded, what is unusual about submodels that were asked for
    by id, which budgets were left out, which of several precisions none chose, and rates of a busy host.
    """

    model: str
    profile: str
    budget_bucket: Bucket
    latency_basis: Literal["predicted", "corrected"]
    candidates: tuple[Candidate, ...]
    budgets: tuple[BudgetPlan, ...]
    notes: tuple[str, ...] = ()

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
    source: Source,
    profile: DeviceProfile,
    *,
    levels: Sequence[Level],
    submodels: Sequence[Submodel] = (),
    corrections: Corrections | None = None,
) -> Plan:
    """For every budget of ``profile`` the largest rung of the ladder that keeps all its limits.

    ``submodels`` are candidates beside the ladder, to be compiled because they were asked for; budgets do not choose
    them. ``corrections`` must cover every bucket and precision of the profile, or be left out.
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
    extra = letters(dict.fromkeys(submodel for submodel in submodels if submodel not in rungs))
    on_ladder = [candidate_of(source, profile, corrections, s, own, i) for i, (s, own) in enumerate(rungs.items())]
    beside = [candidate_of(source, profile, corrections, s, own, None) for s, own in extra.items()]
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
            *unusual(extra, levels),
            *left_out,
            *_of_a_busy_host(profile),
            *_unchosen(on_ladder, budgets, profile),
        ),
    )


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
