"""Device profiles by name, from a YAML file, read strictly, or as a request has one; and written back."""

import os
from dataclasses import replace
from pathlib import Path

import yaml

from ..errors import PlanError, ProfileError
from ..outside_file import read_file
from ..strict import nearest
from .backends import BACKENDS
from .compile_request import CompileRequest
from .device_profile import DeviceProfile, profile_data, read_profile
from .precision import precision_problem
from .probe_host import HOST_PROFILE_NAME, host_profile
from .strict_yaml import MAX_YAML_BYTES, parse_yaml

_BUILTIN = Path(__file__).parent / "builtin"


def builtin_profiles() -> tuple[str, ...]:
    """Names that ``load_profile`` knows, the probed ``host-cpu`` first."""
    return (HOST_PROFILE_NAME, *sorted(path.stem for path in _BUILTIN.glob("*.yaml")))


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """The built-in profile of this name, or the one in this YAML file; a built-in name wins over a file.

    Raises ProfileError if there is neither, or for anything in the file that is not understood.
    """
    if name_or_path == HOST_PROFILE_NAME:
        return host_profile()
    if name_or_path in builtin_profiles():
        path = _BUILTIN / f"{name_or_path}.yaml"
    else:
        path = Path(name_or_path)
        if not os.path.isfile(path):
            hint = nearest(str(name_or_path), builtin_profiles())
            known = f" Built in are {', '.join(builtin_profiles())}" if "did you mean" in hint else ""
            raise ProfileError(f"profile {str(name_or_path)!r}: neither a file nor a built-in profile{hint}{known}")
    return read_profile(parse_yaml(read_file(path, MAX_YAML_BYTES, ProfileError), path, ProfileError), str(path))


def requested_profile(request: CompileRequest) -> DeviceProfile:
    """The profile of ``request`` with what the request puts in place of its own; whether a model has its buckets is not
    asked here. Raises ProfileError, and PlanError for buckets and precisions that cannot be."""
    device = request.profile if isinstance(request.profile, DeviceProfile) else load_profile(request.profile)
    backend = BACKENDS[request.backend or device.backend]
    if backend.name != device.backend:  # what the profile states for its own alone goes
        device = replace(
            device,
            backend=backend.name,
            tensorrt=None if backend.runs_graphs else device.tensorrt,
            capacities=device.capacities if backend.fixed_caches else None,
            host=device.host if backend.runs_graphs else None,
        )
    precisions = device.precisions if request.precisions is None else tuple(request.precisions)
    if problem := precision_problem(precisions, backend.name):
        raise PlanError(f"precision: {problem}")
    levels, shapes = device.levels, request.shapes
    if request.levels is not None:
        levels = {kind: tuple(fractions) for kind, fractions in request.levels.items()}
    return replace(
        device,
        precisions=precisions,
        buckets=device.buckets if shapes is None else shapes,
        budget_at=request.budget_shape or device.budget_at,
        budgets=device.budgets if request.budgets is None else request.budgets,
        levels=levels,
        promotion_order=request.promotion_order or device.promotion_order,
        variants={**(device.variants or {}), **request.variants} if request.variants else device.variants,
        host=device.host if request.measure else None,
    )


def dump_profile(profile: DeviceProfile) -> str:
    """YAML text that ``load_profile`` reads back as an equal profile."""
    return yaml.safe_dump(profile_data(profile), sort_keys=False, allow_unicode=True)
