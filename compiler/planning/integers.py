"""What cannot be of integers, known before anything is traced: engines that would have no scales."""

from __future__ import annotations

from ...errors import PlanError
from ...exporters.source import ModelSource
from ...profiles.device_profile import DeviceProfile
from ...profiles.precision import PRECISIONS
from .variants import chosen_variants


def require_integers(source: ModelSource, profile: DeviceProfile) -> None:
    """Whether engines can have the precisions of ``profile`` that are of integers.

    Scales of activations are found by the engine of one bucket. Engines that read other folded tensors than that one
    would have none for them: raises PlanError where there are such.
    """
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
            # What keeps a cache has one form, whatever ``variants`` say.
            wanted = others if source.cached is None else dict(source.cached.variants)
            raise PlanError(
                f"precision {scaled[0]}: activations are scaled by examples in one variant, and engines have "
                f"{_listed(variants)} at {first} and {_listed(others)} at {where}; ask for one with "
                f"{_asked(wanted)}, or for int8-dynamic, which needs no examples"
            )


def _asked(variants: dict[str, str]) -> str:
    return f"`variants={variants}`"


def _listed(variants: dict[str, str]) -> str:
    return ", ".join(f"{computed}={variant}" for computed, variant in variants.items())
