"""A submodel that could be compiled, and what it costs on a device: bytes, operations, and latency, never measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...bucket import Bucket
from ...elastic import Submodel
from ...exporters.source import ModelSource
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import Precision, precision_of
from .cost_model import Correction, Cost, predict, predict_memory_bytes
from .variants import variant_workload

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
