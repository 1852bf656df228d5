"""What cannot be of integers, known before anything is traced: engines that would not be slices, or have no scales."""

from __future__ import annotations

from collections.abc import Sequence

from ...elastic import Submodel
from ...errors import PlanError
from ...exporters.source import ModelSource
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import PRECISIONS
from .variants import chosen_variants


def require_integers(source: ModelSource, profile: DeviceProfile, submodels: Sequence[Submodel]) -> None:
    """Whether engines of ``submodels`` can have the precisions of ``profile`` that are of integers.

    Raises PlanError for a submodel whose cache needs a graph of its own, and where engines in several variants would
    need scales of activations.
    """
    _require_slices(source, submodels)
    _require_scales(source, profile)


def _require_slices(source: ModelSource, submodels: Sequence[Submodel]) -> None:
    """Engines of integers are slices of one graph. A cache may need a graph for each submodel."""
    why = None if source.cached is None else source.cached.traced_each
    for submodel in submodels:
        precision = source.precision(submodel)
        is_smaller = any(value < axis.size for axis, value in submodel.values if axis.choices is None)
        if why is not None and is_smaller and PRECISIONS[precision].is_integer:
            raise PlanError(
                f"generate: {precision} is for engines that are slices of one graph, and the one of {submodel.id} that "
                f"keeps a cache is not: {why}; ask for levels of 1 alone, or for fp32"
            )


def _require_scales(source: ModelSource, profile: DeviceProfile) -> None:
    """Scales of activations are found by the engine of one bucket. Engines that read other folded tensors than that one
    would have none for them."""
    scaled = [one for one in profile.precisions if PRECISIONS[one].calibration == "scales"]
    if not scaled or not source.spec.folded:
        return
    whole = source.spec.universal()
    found = {str(bucket): chosen_variants(source, whole, bucket, profile) for bucket in profile.buckets}
    if source.cached is not None:
        found["--generate"] = dict(source.cached.variants)
    (first, variants), *rest = found.items()
    for where, others in rest:
        if others != variants:
            raise PlanError(
                f"precision {scaled[0]}: activations are scaled by examples in one variant, and engines have "
                f"{_listed(variants)} at {first} and {_listed(others)} at {where}; ask for one with --variant "
                f"{_listed(others)}, or for int8-dynamic, which needs no examples"
            )


def _listed(variants: dict[str, str]) -> str:
    return ", ".join(f"{computed}={variant}" for computed, variant in variants.items())
