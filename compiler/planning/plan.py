"""Budget to submodel: climb the promotion ladder as far as every limit of the budget allows.

A plan is pure data (``strict.unstructure`` makes JSON of it) and a pure function of its inputs: nothing is traced,
nothing measured. Latencies in it are predicted or, given corrections, corrected; never measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol

from ...elastic import Bucket, ElasticSpec, Submodel
from ...errors import PlanError
from ...exporters.parameter_groups import ParameterGroups
from ...exporters.weight_bytes import WeightBytes
from ...profiles.budget import BudgetSpec, resolve_limit
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import Precision, precision_of
from ...runtime.bundle.manifest import Limits
from ...workload import Op
from .assignments import unusual
from .cost_model import Correction, Cost, predict, predict_memory_bytes
from .ladder import in_every_precision, ladder
from .levels import Level
from .variants import variant_workload


class Source(Protocol):
    """The model to plan for, as far as its headers tell."""

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> ElasticSpec: ...
    def parameter_groups(self, submodel: Submodel) -> ParameterGroups: ...
    def weight_bytes(self, submodel: Submodel, backend: str) -> WeightBytes: ...
    def workload(
        self, submodel: Submodel, bucket: Bucket, variants: Mapping[str, str] | None = None
    ) -> Sequence[Op]: ...
    def variants(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, Mapping[str, Sequence[Op]]]: ...
    @property
    def variant_problems(self) -> Mapping[str, Mapping[str, str]]: ...
    @property
    def onnxruntime_variants(self) -> frozenset[str]: ...


# By bucket of the profile and precision of the rungs that were measured.
Corrections = Mapping[tuple[Bucket, Precision], Correction]


@dataclass(frozen=True)
class BucketCost:
    """Cost of a candidate at its own shape in the place of one bucket of the profile (``Submodel.at``), of a range at
    its largest shape; or in the place of a single shape.

    ``corrected_ms`` exists where rungs were measured at this bucket.
    """

    bucket: Bucket
    flops: int
    moved_bytes: int
    activation_bytes: int
    predicted_ms: float
    corrected_ms: float | None = None

    @property
    def latency_ms(self) -> float:
        """The best figure known without running this candidate."""
        return self.predicted_ms if self.corrected_ms is None else self.corrected_ms


@dataclass(frozen=True)
class Candidate:
    """A submodel that could be compiled. ``rung`` is its place on the ladder, where each rung stands once for every
    precision; None for one that was asked for by id.

    ``weight_bytes`` are those of its parameters in the weight store, ``held_bytes`` what an open engine keeps in memory
    for them, ``memory_mb`` that and the activations of the largest bucket. ``costs`` are those at the buckets,
    ``budget_cost`` is that at the shape where budgets limit latency and FLOPs. ``non_embedding_parameters`` leaves out
    the tables of tokens and positions, ``ffn_parameters`` are those of the feed-forward networks that shrink.
    """

    id: str
    labels: tuple[str, ...]
    values: Mapping[str, tuple[int, ...]]
    parameters: int
    weight_bytes: int
    held_bytes: int
    memory_mb: float
    costs: tuple[BucketCost, ...]
    budget_cost: BucketCost
    non_embedding_parameters: int
    ffn_parameters: int
    rung: int | None = None
    precision: Precision = "fp32"

    @property
    def figures(self) -> dict[str, float]:
        """What budgets limit, by the names that they have there."""
        return {
            "latency_ms": self.budget_cost.latency_ms,
            "memory_mb": self.memory_mb,
            "parameters": self.parameters,
            "flops": self.budget_cost.flops,
            "non_embedding_parameters": self.non_embedding_parameters,
            "ffn_parameters": self.ffn_parameters,
        }


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


@dataclass(frozen=True)
class Plan:
    """What to compile for one model and one device profile.

    Limits hold at the shape ``budget_bucket``, or what a candidate has in its place; ``latency_basis`` says which
    latency they were judged by. ``notes`` states what was rounded, what is unusual about submodels that were asked for
    by id, which budgets were left out, and which of several precisions none chose.
    """

    model: str
    profile: str
    budget_bucket: Bucket
    latency_basis: Literal["predicted", "corrected"]
    candidates: tuple[Candidate, ...]
    budgets: tuple[BudgetPlan, ...]
    notes: tuple[str, ...] = ()


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
    rungs = in_every_precision(ladder(levels, profile.promotion_order))
    known = {rung.id for rung in rungs}
    extra = {submodel.id: submodel for submodel in submodels if submodel.id not in known}
    labels = _labels(levels, rungs, profile)
    on_ladder = [_candidate(source, profile, corrections, s, labels.get(s.id, ()), i) for i, s in enumerate(rungs)]
    beside = [_candidate(source, profile, corrections, s, (), None) for s in extra.values()]
    basis: Literal["predicted", "corrected"] = "corrected" if corrections else "predicted"
    budgets: list[BudgetPlan] = []
    left_out: list[str] = []
    for name, budget in profile.budgets.items():
        try:
            budgets.append(_choose(name, budget, on_ladder, profile, basis))
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
            *unusual(extra.values(), levels),
            *left_out,
            *_unchosen(on_ladder, budgets, profile),
        ),
    )


def figures_of(source: Source, profile: DeviceProfile, submodel: Submodel) -> dict[str, float]:
    """What budgets limit, of any submodel, at the profile's ``budget_shape``; the latency is predicted."""
    return _candidate(source, profile, {}, submodel, (), None).figures


def _candidate(
    source: Source,
    profile: DeviceProfile,
    corrections: Corrections,
    submodel: Submodel,
    labels: tuple[str, ...],
    rung: int | None,
) -> Candidate:
    precision = precision_of(submodel, profile.precisions)

    def predicted(shape: Bucket) -> Cost:
        return predict(variant_workload(source, submodel, submodel.at(shape), profile), profile, precision)

    def stated(shape: Bucket, cost: Cost, measured: Bucket) -> BucketCost:
        return BucketCost(
            bucket=shape,
            flops=cost.flops,
            moved_bytes=cost.moved_bytes,
            activation_bytes=cost.activation_bytes,
            predicted_ms=cost.predicted_ms,
            corrected_ms=corrections[measured, precision].corrected_ms(cost) if corrections else None,
        )

    costs, shape = {bucket: predicted(bucket) for bucket in profile.buckets}, profile.budget_shape
    groups = source.parameter_groups(submodel)
    weights = source.weight_bytes(submodel, profile.backend)
    return Candidate(
        id=submodel.id,
        labels=labels,
        values={kind: tuple(values) for kind, values in submodel.by_kind().items()},
        parameters=groups.total,
        weight_bytes=weights.stored,
        held_bytes=weights.held,
        memory_mb=predict_memory_bytes(weights.held, list(costs.values())) / 1e6,
        costs=tuple(stated(bucket, cost, bucket) for bucket, cost in costs.items()),
        budget_cost=stated(shape, costs.get(shape) or predicted(shape), profile.budget_bucket),
        non_embedding_parameters=groups.non_embedding,
        ffn_parameters=groups.ffn,
        rung=rung,
        precision=precision,
    )


def _labels(levels: Sequence[Level], rungs: Sequence[Submodel], profile: DeviceProfile) -> dict[str, tuple[str, ...]]:
    """Names of the levels by id of the rung: ``M`` in the widest precision, ``M.int8`` in another."""
    labels: dict[str, tuple[str, ...]] = {}
    for level in levels:
        for rung in rungs:
            if rung == level.submodel:
                labels[rung.id] = (*labels.get(rung.id, ()), level.label)
            elif rung.bits and rung.at_bits(level.submodel.bits or rung.bits) == level.submodel:
                name = f"{level.label}.{precision_of(rung, profile.precisions)}"
                labels[rung.id] = (*labels.get(rung.id, ()), name)
    return labels


def _choose(
    name: str, budget: BudgetSpec, rungs: Sequence[Candidate], profile: DeviceProfile, basis: str
) -> BudgetPlan:
    limits = _resolve(budget, rungs[-1].figures)
    if limits.ffn_parameters is not None and rungs[-1].ffn_parameters == 0:
        raise PlanError(f"budget {name!r}: ffn_parameters: this model has no feed-forward networks that shrink")
    checks = _checks(limits, profile, basis)
    broken = {rung.id: _broken(rung, checks) for rung in rungs}
    fitting = [index for index, rung in enumerate(rungs) if not broken[rung.id]]
    if not fitting:
        shorter = ", a shorter range (--bucket)" if any(not bucket.is_static for bucket in profile.buckets) else ""
        raise PlanError(
            f"budget {name!r}: {_nearest(rungs, checks, broken, profile)}; "
            f"raise the limit, add smaller levels{shorter}, or state other budgets (--budget)"
        )
    chosen = fitting[-1]
    figures = rungs[chosen].figures
    kept = ", ".join(f"{c.what} {c.show(figures[c.figure])} of {c.show(c.limit)}" for c in checks if not c.of_device)
    if chosen == len(rungs) - 1:
        reason = f"the universal model keeps {kept}" if kept else "no limits: the universal model"
    else:
        reason = (
            f"rung {chosen + 1} of {len(rungs)} is the largest that keeps {kept or 'the memory of the device'}; "
            f"in the next, {rungs[chosen + 1].id}, {broken[rungs[chosen + 1].id]}"
        )
    rejected = tuple(Rejection(rung.id, broken[rung.id]) for rung in rungs if broken[rung.id])
    return BudgetPlan(name, limits, rungs[chosen].id, reason, rejected)


def _unchosen(rungs: Sequence[Candidate], budgets: Sequence[BudgetPlan], profile: DeviceProfile) -> list[str]:
    """A note for each of several precisions that no budget chose."""
    chosen = {budget.submodel for budget in budgets}
    used = {rung.precision for rung in rungs if rung.id in chosen}
    return [
        f"{precision}: no budget chose it; `--include levels` builds it all the same"
        for precision in profile.precisions
        if len(profile.precisions) > 1 and precision not in used
    ]


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
        return f"not even the smallest submodel {rungs[0].id} fits: {broken[rungs[0].id]}"

    def excess(rung: Candidate) -> float:
        figures = rung.figures
        return max(figures[check.figure] / check.limit if check.limit else inf for check in checks)

    closest = min(rungs, key=excess)
    return f"no submodel fits in any precision; {closest.id} comes closest: {broken[closest.id]}"


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
