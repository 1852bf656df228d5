"""In which of several equal forms an engine computes something: what the profile asks for, else the cheapest there.

A form changes no result but for rounding; a family lists what there is (``Family.forms``), each with its operations.
Engines of one structure at one bucket share a template and so their forms, which are judged at the structure's largest
submodel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ...elastic import Bucket, ElasticSpec, Submodel
from ...errors import PlanError
from ...profiles.device_profile import DeviceProfile
from ...strict import nearest
from ...workload import Op
from .cost_model import predict


class Formed(Protocol):
    """A model to choose forms for, as far as its headers tell."""

    @property
    def spec(self) -> ElasticSpec: ...
    def workload(self, submodel: Submodel, bucket: Bucket, forms: Mapping[str, str] | None = None) -> Sequence[Op]: ...
    def forms(self, submodel: Submodel, bucket: Bucket) -> Mapping[str, Mapping[str, Sequence[Op]]]: ...


def chosen_forms(source: Formed, submodel: Submodel, bucket: Bucket, profile: DeviceProfile) -> dict[str, str]:
    """What is computed to the form that engines of ``submodel`` at ``bucket`` have on the device of ``profile``.

    Of equal costs the first listed wins. Raises PlanError for a form that the profile asks for and that does not exist.
    """
    widest = source.spec.submodel(dict(submodel.structure))
    offered, wanted = source.forms(widest, bucket), profile.forms or {}
    _refuse_unknown(offered, wanted)
    return {
        computed: wanted.get(computed) or min(forms, key=lambda form: predict(forms[form], profile).predicted_ms)
        for computed, forms in offered.items()
    }


def formed_workload(source: Formed, submodel: Submodel, bucket: Bucket, profile: DeviceProfile) -> Sequence[Op]:
    """The operations of the engine of ``submodel`` at ``bucket``, in the forms that it has on this device."""
    return source.workload(submodel, bucket, chosen_forms(source, submodel, bucket, profile))


def _refuse_unknown(offered: Mapping[str, Mapping[str, Sequence[Op]]], wanted: Mapping[str, str]) -> None:
    for computed, form in wanted.items():
        if not offered:
            raise PlanError(f"form {computed}={form}: this model computes nothing in more than one form")
        if computed not in offered:
            raise PlanError(f"form {computed}={form}: no such computation in this model{nearest(computed, offered)}")
        if form not in offered[computed]:
            raise PlanError(f"form {computed}={form}: expected one of {', '.join(offered[computed])}")
