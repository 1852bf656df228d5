"""Which of several equal computations (variants) an engine gets: what the profile asks for, else the cheapest there.

A variant changes no result but for rounding; a family lists what there is (``Family.variants``), each with its
operations. Engines of one structure at one bucket share a template and so their variants, which are judged at the
structure's largest submodel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...bucket import Bucket
from ...elastic import Submodel
from ...errors import PlanError
from ...exporters.architecture import EVERY_VARIANT
from ...exporters.source import ModelSource
from ...profiles.backends import BACKENDS
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import PRECISIONS, TRACED
from ...strict import nearest
from ...workload import Op
from .cost_model import predict


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
