"""Device profiles by name, from a YAML file, read strictly, or as a request has one; and written back. Files with
the job of a compile, or those of a fleet. YAML of outside origin is read safely, without aliases and repeated keys."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..argument_types import options_of
from ..bucket import Bucket
from ..errors import InputError, NestforgeError, PlanError, ProfileError
from ..outside import is_of_library, said_by
from ..outside_file import read_file
from ..strict import nearest, structure, unstructure
from ..whole_file import write_whole
from .backends import BACKENDS
from .budget import BudgetSpec, check_budget
from .compile_request import JOB_OPTIONS, CompileRequest
from .device_profile import DeviceProfile, profile_data, read_profile
from .precision import precision_problem
from .probe_host import HOST_PROFILE_NAME, host_profile


def parse_yaml(raw: bytes | str, path: Path, error: Callable[[str], Exception]) -> object:
    """Data in ``raw``, read of ``path``. Raises ``error(message)``."""
    try:
        return yaml.load(raw, Loader=_StrictLoader)  # noqa: S506  (_StrictLoader is a SafeLoader)
    except BaseException as failure:  # explicit tags raise whatever int(), tables and matches do
        if not is_of_library(failure):
            raise
        raise error(f"{path}: not a readable YAML file ({_said(failure)})") from failure


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without aliases (which can expand without bound) and without repeated keys (where one is lost)."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it bare
            raise yaml.constructor.ConstructorError(
                None, None, f"aliases are not allowed (*{event.anchor})", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain name", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _said(failure: BaseException) -> str:
    if isinstance(failure, yaml.MarkedYAMLError) and failure.problem_mark:
        mark = failure.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {failure.problem}"
    return said_by(failure)


MAX_YAML_BYTES = 256 * 1024
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


_SUFFIXES = (".yaml", ".yml")
_MOST_BYTES = 256 * 1024


def is_job_name(path: Path) -> bool:
    """Whether a file of this name is a job."""
    return path.suffix.lower() in _SUFFIXES


def save_job(request: CompileRequest, path: Path) -> None:
    """Writes every option of ``request``, with the defaults where it states none, into the new file ``path``. Raises
    InputError for another suffix, OutputError for a file that exists."""
    if not is_job_name(path):
        raise InputError(f"{path}: expected a file name that ends in {' or '.join(_SUFFIXES)}")
    data = {name: _plain(getattr(request, name)) for name in JOB_OPTIONS}
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    write_whole(path, lambda stream: stream.write(text.encode()), "the job", new=True)


def load_job(path: Path) -> dict[str, Any]:
    """The options in the file ``path``, as ``CompileRequest`` takes them; those that it leaves out have their defaults.
    Raises InputError for an option that there is not, and for a value of another kind."""
    data = parse_yaml(read_file(path, _MOST_BYTES, InputError), path, InputError)
    if not isinstance(data, dict) or data.get("model") is None:
        raise InputError(
            f"{path}: expected a compile's options by name, the folder of its model among them: `model: FOLDER`"
        )
    for key in data:
        if key not in JOB_OPTIONS:
            raise InputError(f"{path}: no option {key!r:.80}{nearest(str(key)[:80], JOB_OPTIONS)}")
    stated = options_of(CompileRequest)
    job = {name: value for name, value in data.items() if value is not None or stated[name].default is None}
    try:
        if job.get("budgets") is not None:
            job["budgets"] = structure(dict[str, BudgetSpec], job["budgets"], "budgets", InputError)
            for name, budget in job["budgets"].items():
                check_budget(budget, f"budgets.{name}")
        CompileRequest(**job)
    except NestforgeError as failure:
        raise InputError(f"{path}: {failure}") from failure
    return job


def _plain(value: object) -> Any:
    if isinstance(value, Bucket | Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return unstructure(value)


@dataclass(frozen=True)
class _Farm:
    """``jobs`` are files of `nestforge compile --save`, each compiled for every one of ``profiles``: names of built-in
    ones or files; without any for the job's own. ``output`` is the folder of the bundles."""

    jobs: tuple[str, ...]
    output: str
    profiles: tuple[str, ...] = ()


def load_farm(path: Path) -> dict[str, CompileRequest]:
    """The compiles that the file ``path`` states, by the names of their bundles: ``JOB-PROFILE``. Paths are of the
    working directory, as in a job. Plans for TensorRT are left to the devices (``emit_only``).

    Raises InputError for a file that is missing or states anything else, and for two compiles of one name; ProfileError
    for a profile that there is not.
    """
    data = parse_yaml(read_file(path, _MOST_BYTES, InputError), path, InputError)
    farm = structure(_Farm, data, str(path), InputError)
    if not farm.jobs:
        raise InputError(f"{path}: jobs: expected at least one file of `nestforge compile --save`")
    device = cache(load_profile)
    found: dict[str, CompileRequest] = {}
    stated: dict[str, str] = {}
    for job in farm.jobs:
        if not Path(job).is_file():
            raise InputError(f"{path}: jobs: {job}: no such file; expected one that `nestforge compile --save` writes")
        saved = load_job(Path(job))
        for profile in farm.profiles or ("",):
            name = "-".join(Path(part).stem for part in (job, profile) if part)
            output, here = Path(farm.output, f"{name}.bundle"), f"{job} for {profile or 'its own profile'}"
            if name in found:
                raise InputError(
                    f"{path}: {output} would be written twice, by {stated[name]} and {here}; rename a file"
                )
            saved |= {"profile": device(profile or saved.get("profile", CompileRequest.profile)), "output": output}
            request = CompileRequest(**saved)
            emits = not BACKENDS[requested_profile(request).backend].runs_graphs
            found[name], stated[name] = replace(request, emit_only=emits), here
    return found
