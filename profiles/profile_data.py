"""Device profiles as plain data, as YAML files and manifests have them: read, checked and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..bucket import Bucket
from ..errors import ProfileError
from ..strict import structure, unstructure
from .budget import check_budget, require_positive
from .device_profile import SCHEMA_VERSION, DeviceProfile, Rates
from .precision import PRECISIONS, Precision, precision_problem


def read_profile(data: object, where: str) -> DeviceProfile:
    """Reads a profile from plain data (what YAML holds: buckets as ``1x128``); ``where`` names the document.

    Raises ProfileError for an unknown or missing key, a wrong type, or a figure that no device can have.
    """
    if isinstance(data, Mapping):
        if data.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
            raise ProfileError(f"{where}: schema_version {data['schema_version']!r}, expected {SCHEMA_VERSION}")
        data = {**data, "buckets": _read_buckets(data["buckets"], where)} if "buckets" in data else data
        if data.get("budget_at") is not None:
            data = {**data, "budget_at": _read_shape(data["budget_at"], f"{where}: budget_at")}
        data = _with_precisions(data, where)
    profile = structure(DeviceProfile, data, where, ProfileError)
    _check(profile, where)
    return profile


def profile_data(profile: DeviceProfile) -> dict[str, Any]:
    """The plain data that ``read_profile`` reads back as an equal profile, as YAML files have it."""
    data = unstructure(profile)
    precisions = data.pop("precisions")
    data["precision"] = precisions[0] if len(precisions) == 1 else precisions
    if profile.budget_at is not None:
        data["budget_at"] = str(profile.budget_at)
    return {**data, "buckets": [str(bucket) for bucket in profile.buckets]}


def profile_precisions(data: Mapping[str, Any]) -> tuple[Precision, ...]:
    """The precisions in ``profile_data``."""
    given = data.get("precision", "fp32")
    names = [given] if isinstance(given, str) else given
    return tuple(precision for name in names for precision in PRECISIONS if precision == name)


def _read_buckets(texts: object, where: str) -> object:
    if not isinstance(texts, (list, tuple)) or not texts:
        raise ProfileError(f"{where}: buckets: expected a list such as [1x32, 1x128], got {texts!r}")
    try:
        buckets = [Bucket.parse(str(text)) for text in texts]
    except ValueError as failure:
        raise ProfileError(f"{where}: buckets: {failure}") from None
    if len(set(buckets)) != len(buckets):
        raise ProfileError(f"{where}: buckets: one stands twice in {', '.join(map(str, texts))}")
    return [unstructure(bucket) for bucket in buckets]


def _read_shape(text: object, where: str) -> object:
    """One static shape such as ``1x128``."""
    try:
        shape = Bucket.parse(str(text))
    except ValueError as failure:
        raise ProfileError(f"{where}: {failure}") from None
    if not shape.is_static:
        raise ProfileError(f"{where}: expected one shape, such as {shape.largest}, got the range {shape}")
    return unstructure(shape)


def _with_precisions(data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """``data`` with the field that a profile's ``precision``, a name or a list of them, is read into."""
    if "precisions" in data:
        raise ProfileError(f"{where}: unknown key 'precisions'; did you mean 'precision'?")
    if "precision" not in data:
        return data
    given = data["precision"]
    names = list(given) if isinstance(given, (list, tuple)) else [given]
    for name in names:
        if name not in PRECISIONS:
            raise ProfileError(f"{where}: precision: got {name!r:.80}; expected one of {', '.join(PRECISIONS)}")
    return {**{key: value for key, value in data.items() if key != "precision"}, "precisions": names}


def _check(profile: DeviceProfile, where: str) -> None:
    if not profile.name:
        raise ProfileError(f"{where}: name: expected text, got an empty one")
    if not profile.budgets:
        raise ProfileError(f"{where}: budgets: expected at least one; full: {{}} asks for the universal model")
    require_positive(f"{where}: memory_mb", profile.memory_mb)
    for rate in dataclasses.fields(Rates):
        value = getattr(profile.rates, rate.name)
        if isinstance(value, float) and rate.name != "op_overhead_us":
            require_positive(f"{where}: rates: {rate.name}", value)
    if problem := precision_problem(profile.precisions, profile.backend):
        raise ProfileError(f"{where}: precision: {problem}")
    for precision, products in (profile.rates.at or {}).items():
        if precision not in PRECISIONS:
            raise ProfileError(f"{where}: rates: at: got {precision!r:.80}; expected one of {', '.join(PRECISIONS)}")
        require_positive(f"{where}: rates: at.{precision}: gemm_gflops", products.gemm_gflops)
        require_positive(f"{where}: rates: at.{precision}: batched_gemm_gflops", products.batched_gemm_gflops)
    if profile.tensorrt is not None and profile.backend != "tensorrt":
        raise ProfileError(f"{where}: tensorrt: only for backend tensorrt, this profile's is {profile.backend}")
    capacities = profile.capacities
    if capacities is not None and profile.backend != "tensorrt":
        raise ProfileError(f"{where}: capacities: only for backend tensorrt, this profile's is {profile.backend}")
    if capacities is not None and (not capacities or min(capacities) < 2 or len(set(capacities)) != len(capacities)):
        raise ProfileError(
            f"{where}: capacities: expected numbers of tokens, each once and 2 or above, got {capacities}"
        )
    if profile.host is not None and profile.backend != "onnxruntime":
        raise ProfileError(f"{where}: host: a compile measures on ONNX Runtime alone, backend is {profile.backend}")
    for name, budget in profile.budgets.items():
        check_budget(budget, f"{where}: budgets.{name}")
