"""A submodel that could be compiled, what it costs on a device (bytes, operations, and latency, never measured), and
which of several equal computations (variants) its engines get: what the profile asks for, else the cheapest there.

A variant changes no result but for rounding; a family lists what there is (``Family.variants``), each with its
operations. Engines of one structure at one bucket share a template and so their variants, which are judged at the
structure's largest submodel.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...bucket import Bucket
from ...elastic import Submodel
from ...errors import PlanError
from ...exporters.architecture import EVERY_VARIANT
from ...exporters.source import ModelSource
from ...profiles.backends import BACKENDS
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import PRECISIONS, TRACED, Precision, precision_of
from ...strict import nearest
from ...workload import Op
from .cost_model import Correction, Cost, predict, predict_memory_bytes


def chosen_variants(source: ModelSource, submodel: Submodel, bucket: Bucket, profile: DeviceProfile) -> dict[str, str]:
    """Variant of each computation that engines of ``submodel`` at ``bucket`` get on the device of ``profile``.

    The first listed of equal costs wins. Raises PlanError for a variant that the profile asks for and that does not
    exist, or does not hold for this model or on this device.
    """
    widest = source.spec.submodel(dict(submodel.structure))
    offered, wanted = source.variants(widest, bucket), profile.variants or {}
    _refuse_unknown(offered, wanted, source.variant_problems)
    left_out = _left_out(source, wanted, profile)
    return {
        computed: wanted.get(computed)
        or min(
            (variant for variant in costs if variant not in left_out),
            key=lambda variant: predict(costs[variant], profile).predicted_ms,
        )
        for computed, costs in offered.items()
    }


def variant_workload(source: ModelSource, submodel: Submodel, bucket: Bucket, profile: DeviceProfile) -> Sequence[Op]:
    """The operations of the engine of ``submodel`` at ``bucket``, in the variants that it has on this device."""
    variants = chosen_variants(source, submodel, bucket, profile)
    return source.workload(submodel, bucket, variants)


def require_scales(source: ModelSource, profile: DeviceProfile) -> None:
    """Raises PlanError where an engine in a calibrated precision of ``profile`` would have no scales: they are found by
    the engine of one bucket, and so known of the folded tensors alone that its variants read."""
    scaled = [one for one in profile.precisions if PRECISIONS[one].calibration == "scales"]
    if not scaled or not source.spec.folded:
        return
    whole = source.spec.universal()
    found = {str(bucket): chosen_variants(source, whole, bucket, profile) for bucket in profile.buckets}
    if source.cached is not None:
        found["`generate`"] = dict(source.cached.variants)
    (first, variants), *rest = found.items()
    for where, others in rest:
        if others != variants:
            # A KV-cache engine has one form, whatever ``variants`` say.
            wanted = others if source.cached is None else dict(source.cached.variants)
            raise PlanError(
                f"precision {scaled[0]}: activations are scaled by examples in one variant, and engines have "
                f"{_listed(variants)} at {first} and {_listed(others)} at {where}; ask for one with "
                f"`variants={wanted}`, or for int8-dynamic, which needs no examples"
            )


@dataclass(frozen=True)
class VariantView:
    """``variants``: what engines of ``submodel`` (its id) at ``bucket`` (its label) compute, to the variant of it."""

    submodel: str
    bucket: str
    variants: dict[str, str]


def variant_views(source: ModelSource, submodels: Iterable[Submodel], device: DeviceProfile) -> tuple[VariantView, ...]:
    """One view for every submodel and bucket of ``device``; none of a model that has one variant of everything.

    Raises PlanError for a variant that the profile asks for and that does not exist.
    """
    return tuple(
        VariantView(submodel.id, bucket.label, variants)
        for submodel in submodels
        for bucket in dict.fromkeys(submodel.at(bucket) for bucket in device.buckets)
        if (variants := chosen_variants(source, submodel, bucket, device))
    )


def _left_out(source: ModelSource, wanted: Mapping[str, str], profile: DeviceProfile) -> frozenset[str]:
    """The variants that engines of ``profile`` cannot have; raises PlanError where one of them is requested."""
    if BACKENDS[profile.backend].own_operators and profile.precisions == (TRACED,):
        return frozenset()
    other = not BACKENDS[profile.backend].own_operators
    given = f"backend {profile.backend}" if other else f"precision {', '.join(profile.precisions)}"
    for computed, variant in wanted.items():
        if variant in source.onnxruntime_variants:
            raise PlanError(
                f"variant {computed}={variant}: an operator that ONNX Runtime alone has, and in fp32 alone; profile "
                f"{profile.name} has {given}"
            )
    return source.onnxruntime_variants


def _refuse_unknown(
    offered: Mapping[str, Mapping[str, Sequence[Op]]],
    wanted: Mapping[str, str],
    problems: Mapping[str, Mapping[str, str]],
) -> None:
    for computed, variant in wanted.items():
        known = problems.get(computed, {})
        if problem := known.get(variant, known.get(EVERY_VARIANT)):
            raise PlanError(f"variant {computed}={variant}: {problem}")
        if not offered:
            raise PlanError(f"variant {computed}={variant}: this model computes nothing in more than one variant")
        if computed not in offered:
            raise PlanError(
                f"variant {computed}={variant}: no such computation in this model{nearest(computed, offered)}"
            )
        if variant not in offered[computed]:
            raise PlanError(f"variant {computed}={variant}: expected one of {', '.join(offered[computed])}")


def _listed(variants: dict[str, str]) -> str:
    return ", ".join(f"{computed}={variant}" for computed, variant in variants.items())


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
    precision; None for one that was requested by id.

    ``weight_bytes`` are those of its parameters in the weight store, ``held_bytes`` what an open engine keeps in memory
    for them, ``memory_mb`` that and the activations of the largest bucket. ``costs`` are those at the buckets,
    ``budget_cost`` is that at the shape where budgets limit latency and FLOPs. ``non_embedding_parameters`` leaves out
    the tables of tokens and positions, ``ffn_parameters`` are those of the feed-forward networks that shrink.
    ``states`` are figures that a published table has of it.
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
    states: Mapping[str, float] | None = None

    @property
    def label(self) -> str:
        """Its short name, its id where it has none."""
        return self.labels[0] if self.labels else self.id

    @property
    def figures(self) -> dict[str, float]:
        """Limited quantities, by the names that they have there."""
        return {
            "latency_ms": self.budget_cost.latency_ms,
            "memory_mb": self.memory_mb,
            "parameters": self.parameters,
            "flops": self.budget_cost.flops,
            "non_embedding_parameters": self.non_embedding_parameters,
            "ffn_parameters": self.ffn_parameters,
        }


def candidate_of(
    source: ModelSource,
    profile: DeviceProfile,
    corrections: Corrections,
    submodel: Submodel,
    labels: tuple[str, ...],
    rung: int | None,
) -> Candidate:
    """``submodel`` with what it costs on ``profile``, at the place ``rung`` of the ladder."""
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


def figures_of(source: ModelSource, profile: DeviceProfile, submodel: Submodel) -> dict[str, float]:
    """Limited quantities of any submodel, at the profile's ``budget_shape``; the latency is predicted."""
    return candidate_of(source, profile, {}, submodel, (), None).figures
